"""The engine does not come up or does not answer as asked: ports, probes, tools, templates, names.

Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
named.
"""

from __future__ import annotations

SERVE_SIGNATURES = r"""
== port_in_use | root | certain
line address already in use
line \[Errno (?:98|48|10048)\]|EADDRINUSE|Only one usage of each socket address
line port is already allocated|couldn't bind (?:HTTP )?server socket
line Bind for \S+:(?P<port>\d+) failed
line [Pp]ort (?P<port>\d+) is (?:already )?(?:in use|occupied|not available)
also (?:', |:|[Pp]ort[: ]{1,2})(?P<port>\d{2,5})\b
cause Another process, often the previous server, holds the port {port?}.
change act find it: ss -ltnp shows who listens on port {port?}; stop it if it is an old server
change flag --port: {port?as it is} -> a free one
futile longer timeouts, memory flags
issue vllm-project/vllm#8204

== port_not_allowed | root | certain
line bind.{0,60}[Pp]ermission denied|\[Errno 13\].{0,60}bind
cause Ports below 1024 need privileges.
change flag --port: as it is -> 8000 or another above 1023
futile stopping other servers

== bind_address_wrong | root | certain
line Cannot assign requested address|EADDRNOTAVAIL
cause The address to listen on does not belong to this machine or container.
change flag --host: as it is -> 127.0.0.1 (0.0.0.0 within a container)
futile another port

== cloud_run_wrong_address | root | certain
line (?:failed to start and listen|listen) on the port
near (?:Listening on|listening on|running on|starting server on|address=)\D{0,20}(?:127\.0\.0\.1
  |localhost|\[::1\])
cause The server listens on loopback inside its container, where Cloud Run cannot see it (Ollama's
  default is 127.0.0.1:11434; Cloud Run expects PORT, 8080).
change setting OLLAMA_HOST: 127.0.0.1:11434 -> 0.0.0.0:8080 (--host 0.0.0.0 --port 8080 elsewhere)
change flag --port: as it is -> the port that the server really uses (gcloud run deploy)
futile a longer start-up probe
issue ollama/ollama#9133

== cloud_run_startup | symptom | likely
line failed to start and listen on the port(?: defined)?.{0,80}?PORT=(?P<port>\d+)
line (?:STARTUP|startup)[ -]probe.{0,20}failed|Startup TCP probe failed
line startup_probe.{0,80}must be a number between (?P<low>\d+) and (?P<limit>\d+)
line DEADLINE_EXCEEDED.{0,80}(?:probe|container)
line failed the configured startup probe|Startup probes? timed out
line Container failed to become healthy
sum probe_window
cause The container did not answer on its port before the start-up probe gave up: the model loads
  for longer than the window (240 s by default), or the container ended before. This is a symptom:
  the revision's own log says which.
change flag --startup-probe: 240 s -> periodSeconds=10,failureThreshold=180 (the period is capped at
  240, so the threshold has to grow)
change act read the revision's log for the line before it: a flag error looks the same from outside
change act listen on 0.0.0.0 and on PORT (8080 by default; OLLAMA_HOST for Ollama), not on loopback
change act a faster source of the weights (streamed from a bucket in the same region)
futile --timeout: it is the time of a request, not of the start
issue googlecodelabs/feedback#1550; observ-ing/core#177

== cloud_run_exit | symptom | likely
line Container called exit\((?P<status>\d+)\)
line Application exec likely failed|Default STARTUP .{0,40}failed .{0,60}attempts
cause The container ended by itself (status {status?see the line}); why stands above it.
change act read the container's own lines before this one
futile a longer probe

== k8s_crash_loop | symptom | likely
line CrashLoopBackOff|Back-off restarting failed container
line (?:Liveness|Startup) probe failed
cause Kubernetes restarts a container that ends, or does not answer in time; why stands in the log
  of its previous run.
change act kubectl logs --previous shows the run that ended
change setting startupProbe.failureThreshold: as it is -> enough for loading and compiling
futile deleting the pod

== engine_core_failed | echo | possible
line Engine core initialization failed|EngineDeadError|EngineCore (?:encountered|failed)
line Engine process failed to start|AsyncEngineDeadError|LLMEngine.{0,20}died
line WorkerProc (?:initialization failed|failed to start|hit an exception)
cause The process around the engine reports that it ended; the reason stands in the engine's own
  lines above.
change act read the first traceback above: it is the root, this is its echo
futile restarting with the same values

== engine_start_timeout | fault | likely
line (?:Timed out|timed out|Timeout).{0,60}waiting for (?:engine|worker|the engine)
line timed out waiting for llama runner to start
line Did not receive response from (?:front-end|engine) process within (?P<seconds>\d+)
cause The engine did not come up in the time given: loading or compiling takes longer.
change setting VLLM_ENGINE_READY_TIMEOUT_S: 600 -> 2400 (OLLAMA_LOAD_TIMEOUT for Ollama)
change act a compile cache that outlives the machine, so that the next start is shorter
futile more memory, unless the log also shows swapping

== tool_parser_not_set | root | certain
line tool choice requires --enable-auto-tool-choice and --tool-call-parser
line --enable-auto-tool-choice (?:requires|is not set)|requires --tool-call-parser
line requires --enable-auto-tool-choice
cause The server was started without its tool flags, and agents (Claude Code among them) send tools
  with every request: 400.
change flag --enable-auto-tool-choice: off -> on
change flag --tool-call-parser: none -> gemma4
futile another prompt, restarting unchanged
issue swiss-ai/model-launch#213

== tools_not_supported | root | certain
line does not support (?P<what>tools|chat|thinking|vision|generate|insert|embeddings?)
cause The served model or tag does not support {what?what was asked}.
change setting MODEL_NAME: as it is -> a tag or variant with {what?this} (an -it model with its own
  template)
futile restarting

== tool_stream_malformed | root | likely
line Expected '?(?:function\.name|id)'? to be a string
line (?:tool_calls?|function)[\w\[\].' ]{0,40}(?:is missing|undefined|Required).{0,60}(?:name|id)\b
cause The streamed tool call reached the client without its id or name: a fault of the server's
  streaming tool parser.
change package vllm: as it is -> newer (the engine's new parser, PR #45588)
change setting stream: true -> false, as a workaround
futile another client
issue vllm-project/vllm#42696

== raw_tool_tokens | root | likely
line "(?:content|text)": ?".{0,400}?<\|?(?:tool_call|tool_response|channel)\|?>
line "(?:content|text)": ?".{0,400}?<\|\\?"\|>
cause Gemma's control tokens came through as text: no tool or reasoning parser took them out.
change flag --tool-call-parser: none -> gemma4
change flag --reasoning-parser: none -> gemma4
change package vllm: as it is -> newer, where the parser leaks in streaming
futile asking the model not to write them
issue vllm-project/vllm#44522

== context_exceeded | root | certain
line maximum context length is (?P<limit>\d+) tokens.{0,120}?(?:requested|passed|has|contains at
  least) (?P<prompt>\d+)
line exceeds? the available context size(?: \((?P<limit>\d+))?
line prompt (?:is too long|contains too many tokens)|prompt length .{0,40}exceeds
line Input (?:length|prompt) \(?(?P<prompt>\d+).{0,60}?(?:exceeds|longer than).{0,40}?(?P<limit>\d+)
line \(length (?P<prompt>\d+)\) is longer than the maximum model length of (?P<limit>\d+)
sum prompt_that_fits
cause The request ({prompt?too many} tokens) is longer than the served context ({limit?less}).
change setting max_tokens: as it is -> {fits?at most what the context leaves}
change flag --max-model-len: {limit?as it is} -> larger, if the KV cache allows (plan_deployment
  computes it)
futile repeating the request

== model_name_mismatch | root | certain
line The model `(?P<model>[^`]+)` does not exist
line model '(?P<model>[^']+)' (?:does not exist|is not (?:served|available))
cause The request names a model that is not served here: {model?see the line}.
change setting model (in the request): {model?as it is} -> the name that /v1/models lists
change flag --served-model-name: none -> the name that clients send
futile downloading the model

== api_key_wrong | root | likely
line (?:Incorrect|Invalid|missing) API key|\b401 Unauthorized\b.{0,60}/v1/
line "POST /v1/\S+ HTTP/1\.\d" 401
cause The client sent no API key, or another than the server's.
change setting the client's API key: as it is -> the one that the server was started with
futile restarting the server

== cloud_run_not_invoker | root | certain
line Your client does not have permission to get URL
line The request was not authenticated.{0,120}(?:run|invoker|identity)
line access token could not be verified.{0,60}|The access token could not be verified
cause Cloud Run refuses the caller: no identity token, a wrong audience, or no right to call.
change grant roles/run.invoker: missing -> granted to the caller on the service
change act send an identity token whose audience is the service's address (an access token gives
  401)
futile the API key of the engine

== cloud_run_no_instance | root | likely
line no available instance
line The request was aborted because
cause No instance was free for the request: scaled to zero, or all at their concurrency.
change flag --min-instances: 0 -> 1 (it costs while idle)
change flag --max-instances: as it is -> more, within the quota
futile the client's retries alone

== server_busy | root | certain
line server busy, please try again|maximum pending requests exceeded
line \b503\b.{0,60}(?:overloaded|queue is full)
cause More requests wait than the server's queue holds.
change setting OLLAMA_MAX_QUEUE: 512 -> more; or OLLAMA_NUM_PARALLEL: 1 -> more, if memory allows
change act fewer requests at once
futile restarting

== cloud_run_gpu_minimum | root | likely
line resources\.limits.{0,160}(?:[Ii]nvalid value|must be|at least)
line GPUs? require.{0,60}(?:CPU|memory)
cause Cloud Run refuses the size: with a GPU at least 4 CPUs and 16 GiB of memory are needed (8 and
  32 are advised).
change flag --cpu: as it is -> 8
change flag --memory: as it is -> 32Gi
futile another region

== multimodal_limit | root | certain
line At most (?P<limit>\d+) (?P<what>image|audio|video)\S* may be provided
cause The request holds more {what?media} than the server allows ({limit?fewer}).
change flag --limit-mm-per-prompt: {limit?as it is} -> more of {what?them}, as JSON
futile a longer context alone

== audio_unavailable | root | certain
line Invalid or unsupported audio file
line (?:librosa|soundfile|av|soxr).{0,60}(?:not installed|is required|No module named)
cause The server lacks its audio packages, or got a file that is no audio.
change package vllm[audio]: missing -> installed, same version as vllm (a derived image)
futile another model size

== structured_output_failed | root | likely
line (?:xgrammar|guided[_ ]decoding|structured[_ ]outputs?|json[_ ]schema).{0,120}(?:failed
  |unsupported|not supported|invalid|error)
line Failed to (?:convert|compile) .{0,60}(?:grammar|schema)
cause The schema (or grammar) of the request is not supported by the structured output backend.
change act a simpler schema (no unbounded patterns, no unsupported keywords)
change flag --structured-outputs-config: as it is -> another backend (guidance)
futile another temperature

== schema_not_enforced | root | likely
line JSONDecodeError|Expecting value: line 1 column 1|(?:answer|output|content).{0,40}not (?:valid
  )?JSON
near reasoning[-_]parser|enable_thinking
cause The schema of the request was not enforced: with a reasoning parser and thinking off the
  engine waits for the end of a thought that never comes, and answers prose with status 200.
change flag --reasoning-parser: gemma4 -> none, where thinking is off
change setting enable_thinking: false -> true, where the parser stays
change package vllm: as it is -> newer (PR #52430)
futile a stricter schema, another prompt
issue vllm-project/vllm#39138, #54881

== llama_runner_terminated | symptom | likely
line llama (?:runner|server) process (?:has )?terminated(?!: signal: killed)
line llama-server process has terminated|model runner has unexpectedly stopped
line llama runner terminated
line (?:process|runner) .{0,20}terminated: (?:%!w\(<nil>\)|exit status (?P<status>\d+))
line unable to load model: 
cause The model runner of Ollama ended; why stands in its own lines before this one.
change setting OLLAMA_DEBUG: 0 -> 1, to see the runner's own words
change setting num_ctx: as it is -> shorter (ROCm with a long context ends like this without a word)
futile pulling the model again
issue ollama/ollama#15338

== runner_crashed | fault | likely
line Segmentation fault|SIGSEGV|core dumped|Fatal Python error
line Uncaught signal: (?P<signal>\d+)
unless GGML_ASSERT|flash_attn|fattn
cause The process crashed in native code.
change package engine: as it is -> another build; native crashes are a build's fault
change act run it once with the accelerator left out, to see which side it is
futile other prompts

== request_failed | echo | possible
line "(?:POST|GET) /\S+ HTTP/1\.\d" 500
line \b500 Internal Server Error
cause A request failed inside the server; why stands beside it in the server's log.
change act read the traceback next to it
futile repeating the request

== connection_refused | echo | possible
line [Cc]onnection refused|ECONNREFUSED|Failed to connect to \S+ port
unless (?:Readiness|Liveness|Startup) probe
cause Nothing listens at that address (yet): the server is still starting, has ended, or listens
  elsewhere.
change act look at the server first: its own log says whether it is starting or has ended
futile firewall rules: a firewall lets a connection hang, it does not refuse it
"""
