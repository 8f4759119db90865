"""Checkpoint and engine do not fit each other: architectures, tensors, formats, versions, flags.

Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
named.
"""

from __future__ import annotations

LOAD_SIGNATURES = r"""
== missing_k_norm | root | certain
line weights were not initialized from checkpoint
line (?:Missing key|missing (?:\d+ )?(?:keys?|tensors?|weights?|parameters?)).{0,400}k_norm
line Missing \d+ parameters
line (?:tensor|weight|key|KeyError).{0,160}k_norm.{0,80}(?:not found|missing|is missing)
line KeyError: .{0,120}self_attn\.k_norm
near (?:layers|blk)\.(?P<layer>\d+)\.\S{0,20}k_norm
also layers\.(?P<layer>\d+)\.\S{0,20}k_norm
cause Gemma 4's last layers share the KV cache of earlier ones and own no k_norm (E2B: layers 15 to
  34). The export omits it rightly; the loader demands it. The fault is the loader's, the checkpoint
  is whole.
change package vllm: as it is -> a build with PR #54917 (tpu-inference: PR #3299)
change setting MODEL_NAME: the QAT or fine-tuned export -> the plain -it checkpoint, which carries
  the redundant tensors
futile downloading again: nothing is missing from the files
issue vllm-project/vllm#44788 (fix: PR #54917); vllm-project/tpu-inference#3225

== extra_k_norm | root | certain
line (?:not in model|unexpected key|no parameter|unrecognized).{0,400}k_norm
line k_norm.{0,160}(?:not in model|is unexpected|not in params_dict)
line Received (?:\d+ )?parameters? not in model
near k_norm
cause The checkpoint carries k_norm tensors for layers that share KV and have none in this engine's
  model: redundant tensors that the loader should skip. The inverse of a missing k_norm.
change package engine: as it is -> a build that skips tensors of KV-shared layers
change act or a checkpoint exported without them
futile a new download: the file is as published
issue vllm-project/vllm-metal#299

== parameters_not_in_model | root | likely
line Received (?P<count>\d+) parameters? not in model
line (?P<count>\d+) parameters? not in model
line Unexpected key\(s\) in state_dict|unexpected keys? in (?:the )?checkpoint
line There is no module or parameter named '?(?P<name>[\w.]+)
unless k_norm
cause The checkpoint's tensors ({count?several}) have names that this engine's model does not have:
  a quantised layout (such as compressed-tensors w4a16) or wrapper that it does not know.
change setting MODEL_NAME: as it is -> a checkpoint in a layout that this engine loads (bf16, or its
  own quantisation)
change package engine: as it is -> one that supports this quantisation
futile memory flags
issue jundot/omlx#1775

== missing_v_proj | root | likely
line Found a different quantization schemes? for
line (?:KeyError|[Mm]issing|not found|not initialized).{0,400}v_proj
line v_proj.{0,120}(?:not found|missing|KeyError)
cause A tensor v_proj is missing: layers of Gemma 4 with attention_k_eq_v have none, and mixed
  quantisation in one fused qkv breaks on that.
change setting MODEL_NAME: the mixed quantised checkpoint -> one quantised uniformly (or bf16)
change package vllm: as it is -> newer
futile downloading again
issue vllm-project/vllm#47473

== weights_not_initialized | fault | likely
line weights were not initialized from checkpoint
line Error\(s\) in loading state_dict|Missing key\(s\) in state_dict
line size mismatch for (?P<name>[\w.]+)
line Tried to load weights of size
unless k_norm|v_proj
cause Checkpoint and model code do not agree on their tensors ({name?see the line}).
change package vllm and transformers: as they are -> the versions that the checkpoint names
change act check config.json against the checkpoint's family and size
futile memory flags

== unsupported_quant_scheme | root | certain
line No compressed-tensors compatible scheme was found
line (?:quantization|quantisation)(?: method)? '?"?(?P<method>[\w-]+)'?"? is not supported
line (?:Unknown|Unsupported|Invalid) quantization (?:method|type|scheme):? ?(?P<method>[\w-]+)?
line does not match the quantization method specified in
line quantization (?:method )?(?P<method>[\w-]+) is currently not supported
cause This build (or this hardware) has no kernel for the checkpoint's quantisation scheme
  {method?(compressed-tensors)}.
change setting MODEL_NAME: as it is -> a checkpoint whose scheme is in the engine's table for this
  hardware (bf16, fp8)
change package vllm: as it is -> newer, where its table has the scheme
futile memory flags, --dtype
issue vllm-project/vllm#19853

== transformers_too_old | root | certain
line model type `?'?(?P<type>[\w-]+)`?'? but Transformers does not recognize this architecture
line Transformers does not recognize this architecture
line requires (?:a )?transformers ?(?:version )?(?:>=|newer than|at least) ?(?P<needed>[\d.]+)
line cannot import name '?(?P<name>Gemma4\w*)'? from 'transformers
line (?:KeyError|ValueError): '?gemma4\w*'?\s*$
cause The installed transformers is older than the model ({type?its type} is unknown to it).
change package transformers: as it is -> newer, within the engine's range (update or rebuild the
  image)
futile --trust-remote-code: the repository holds no code for it
issue timothystewart6/vllm-gb10#97

== transformers_too_new | root | certain
line AmbiguousGlobalPerLayerAttribute
line requires transformers.{0,20}(?:<|==) ?(?P<limit>[\d.]+).{0,60}(?:you have|found|installed)
line Gemma4\w*Config' object has no attribute '(?P<name>\w+)
line (?:head_dim|num_key_value_heads).{0,60}(?:ambiguous|per[- ]layer)
cause The installed transformers is newer than this engine expects: since 5.15 a Gemma 4 config has
  no single head_dim, and vLLM up to 0.27.1 reads one.
change package vllm: as it is -> 0.28 or newer (fix: PR #49797)
change package transformers: as it is -> pinned to 5.14.1 (downgrade), where vLLM has to stay
futile upgrading transformers further, memory flags
issue vllm-project/vllm#52768, #51744 (fix: PR #49797)

== architecture_unsupported | root | certain
line Model architectures \[?'?(?P<type>\w+)'?\]? .{0,60}(?:are not supported|failed to be inspected)
line has no (?:vLLM|TPU|JAX) implementation|not supported for now
line Unrecognized model in (?P<model>[\w./-]+)|Should have a `model_type` key
line (?:Cannot find model module|No model class|Unsupported architecture)\W{1,4}(?P<type>\w+)?
line Unknown RoPE scaling type
cause This engine's build has no implementation of {type?the model's architecture}.
change package engine: as it is -> newer, with Gemma 4
change act check that config.json is the model's own and whole
futile memory flags

== pickle_refused | root | certain
line serious vulnerability issue in `?torch\.load
line Weights only load failed
line (?:pytorch_model|consolidated)\S*\.(?:bin|pth|pt)\b.{0,160}(?:pickle|unsafe|refus)
cause The checkpoint holds pickled weights, which run code when they are loaded; they are refused.
change setting MODEL_NAME: as it is -> a checkpoint in safetensors
futile switching the check off: it is a stranger's program

== gguf_arch_unknown | root | certain
line unknown (?:model )?architecture: '?"?(?P<type>[\w-]+)
line unsupported (?:model )?architecture:? \[?'?"?(?P<type>gemma\w+)
line unknown pre-tokenizer type: '(?P<type>[\w.-]+)
cause The llama.cpp build (or the Ollama around it) is older than {type?the model}.
change package llama.cpp or ollama: as it is -> newer (update or rebuild)
futile GPU layers, context, memory: loading stopped before any of them counted
issue ggml-org/llama.cpp#21309; ollama/ollama#15303

== gguf_damaged | root | certain
line is not within the file bounds, model is corrupted or incomplete
line invalid magic(?: characters?|:)|failed to read (?:magic|tensor|key)
line wrong number of tensors; expected (?P<wanted>\d+), got (?P<found>\d+)
line missing tensor '(?P<name>[\w.]+)
line check_tensor_dims: tensor '(?P<name>[\w.]+)' (?:not found|has wrong shape)
line gguf_init_from_file: .{0,80}(?:failed|error)
cause The GGUF file is damaged, cut off, or of a newer layout than the build ({name?see the line}).
change act download it again and compare its SHA-256; then a newer llama.cpp
futile fewer GPU layers

== gguf_metadata_missing | root | certain
line error loading model hyperparameters|key not found in model: (?P<name>[\w.]+)
cause The GGUF file lacks a key that this build reads ({name?see the line}): it was converted by or
  for another program (Ollama's own files differ from llama.cpp's).
change setting MODEL_NAME: as it is -> a GGUF made by llama.cpp's own converter for this model
change package llama.cpp: as it is -> the build that the file names
futile fewer GPU layers, a shorter context

== safetensors_damaged | root | certain
line SafetensorError|deserializing header
line MetadataIncompleteBuffer|InvalidHeaderDeserialization|HeaderTooLarge
cause A safetensors file is cut off or is no such file (a Git LFS pointer, a web page).
change act remove that file and download it again; compare its size with the repository's
futile engine flags

== cuda_kernel_crash | root | likely
line fattn[\w.-]*\.cuh?:\d+: (?:fatal error|GGML_ASSERT)
line ggml_cuda_flash_attn_ext
line flash_attn.{0,80}(?:fatal error|abort|not implemented|unsupported)
cause llama.cpp's CUDA flash attention has no kernel for this model on this card (Gemma 4's head
  sizes; Turing and others).
change flag --flash-attn: on -> off
change package llama.cpp: as it is -> a build with PR #25148 (or Vulkan meanwhile)
futile fewer GPU layers, a shorter context
issue ggml-org/llama.cpp#24400, #24376

== ggml_split_inputs | root | certain
line GGML_SCHED_MAX_SPLIT_INPUTS
line n_inputs < GGML_SCHED
cause A partial offload splits the graph into more inputs than ggml's limit: some layers on the GPU
  and some not, on a small card.
change flag --n-gpu-layers: some -> all (99) or none (0)
change package llama.cpp or ollama: as it is -> another build
futile a shorter context
issue ollama/ollama#16506; ggml-org/llama.cpp#24132

== ggml_assert | fault | likely
line (?P<file>[\w./-]+\.(?:cpp|cuh?|c)):\d+: GGML_ASSERT
line GGML_ASSERT\(.{1,120}\) failed
unless GGML_SCHED_MAX_SPLIT_INPUTS|fattn
cause An assertion of ggml failed: a case that this build does not handle.
change package llama.cpp: as it is -> another build (regressions are usual within a week)
change flag --n-gpu-layers: as it is -> 0, to see whether the backend is at fault
futile trying again with the same build

== model_parser_mismatch | root | certain
line Gemma4ReasoningParser|Gemma4ToolParser
line (?:reasoning|tool[_ ]call)[_ ]parser.{0,120}(?:could not locate|cannot find
  |missing).{0,60}token
near ['"/](?:google/)?gemma-(?P<generation>[123])-[\w.-]+
cause A Gemma {generation?3} model is served with Gemma 4's parsers or chat template: its tokenizer
  has none of their tokens. The arguments tell it (a gemma-3 model, a gemma4 parser), not the error.
change setting MODEL_NAME: the gemma-{generation?3} model -> the Gemma 4 model of that size
change flag --reasoning-parser: gemma4 -> none, for a Gemma {generation?3} model
change flag --tool-call-parser: gemma4 -> none (and its --chat-template), for the same model
futile a newer vLLM
issue vllm-project/recipes#515

== parser_unknown | root | certain
line invalid (?:tool call|reasoning) parser: ?(?P<name>[\w-]+)
line (?:reasoning|tool) parser '?(?P<name>[\w-]+)'? (?:not found|is not registered)
line KeyError: .{0,20}invalid (?:tool|reasoning).{0,40}parser
cause This build knows no parser {name?of that name} (it is older than the model's recipe).
change package vllm: as it is -> newer, which has it
change flag --tool-call-parser: {name?as it is} -> one that the message lists
futile another chat template

== chat_template_missing | root | certain
line default chat template is no longer allowed|must provide a chat template
line tokenizer\.chat_template is not set|does not (?:have|define) a chat template
line Cannot use chat template functions because
line chat template .{0,80}(?:does not exist|not found|appears path-like)
cause The tokenizer has no chat template: a base model, or a checkpoint copied without
  chat_template.jinja.
change setting MODEL_NAME: the base model -> its -it variant
change flag --chat-template: none -> the model's own template file
futile another prompt, a larger context

== cli_flag_error | root | certain
line unrecognized arguments?:\s*(?P<flag>--?[\w-]+)
line error: argument (?P<flag>--?[\w/-]+): (?P<why>[\w ']+)
line error: the following arguments are required: (?P<flag>[\w, -]+)
line (?:error: )?(?:unknown|unexpected|invalid) (?:argument|option|flag):? '?(?P<flag>--?[\w-]+)
line error while handling argument "(?P<flag>--?[\w-]+)"
line No such option: (?P<flag>--?[\w-]+)
line ambiguous option: (?P<flag>--?[\w-]+)
line Invalid choice: '?(?P<flag>[\w-]+)
line arguments? (?:was|were) not expected: (?P<flag>--?[\w-]+)
cause The program does not accept {flag?an argument}: misspelt, of another version, or with a wrong
  value. It ended at once; probe or readiness messages after it are only its echo.
change flag {flag?the flag}: as given -> removed, or as this version's --help spells it
futile longer start-up timeouts, more memory, another port
issue googlecodelabs/feedback#1825

== config_rejected | fault | certain
line validation errors? for (?P<name>\w+)
line (?:ValidationError|pydantic).{0,80}(?:Value error|Extra inputs|Input should)
cause The engine refuses its configuration ({name?see the line}); the reason stands in the lines
  below it.
change act correct the value that the next lines name
futile trying again

== context_beyond_model | root | certain
line User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len
  \(.{0,60}?(?P<fits>\d+)
line max_model_len .{0,60}(?:exceeds|is greater than|larger than) .{0,60}?(?P<fits>\d{3,})
cause The context asked for ({asked?too long}) is longer than the model was made for ({fits?less}).
change flag --max-model-len: {asked?as it is} -> {fits?the model's own}
futile VLLM_ALLOW_LONG_MAX_MODEL_LEN: answers beyond the model's context are not sound

== batched_tokens_too_small | root | certain
line max_num_batched_tokens \((?P<batch>\d+)\) is smaller than max_model_len \((?P<needed>\d+)\)
line max_tokens_per_mm_item \((?P<needed>\d+)\).{0,80}max_num_batched_tokens \((?P<batch>\d+)\)
cause One step may hold {batch?fewer} tokens, and one item needs {needed?more}.
change flag --max-num-batched-tokens: {batch?as it is} -> {needed?the number in the message}
futile more memory

== parallel_size_invalid | root | certain
line attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<asked>\d+)\)
line must be divisible by (?:the )?tensor[ _](?:model )?parallel[ _]size
line not aligned with the quantized weight shape
sum largest_divisor
cause {heads?The} attention heads cannot be split over {asked?so many} devices.
change flag --tensor-parallel-size: {asked?as it is} -> {fits?a divisor of the heads}
futile more memory

== too_few_devices | root | certain
line world size \((?P<asked>\d+)\) is larger than the number of available (?:GPUs|devices)
  \((?P<fits>\d+)\)
line (?:tensor_parallel_size|World size).{0,60}(?:larger|greater) than the number of available
line The number of required (?:GPUs|TPUs|TPU chips) exceeds the total number of available
cause More devices are asked for ({asked?see the line}) than there are ({fits?fewer}).
change flag --tensor-parallel-size: {asked?as it is} -> {fits?the number of devices}
futile waiting

== remote_code_wanted | root | certain
line contains custom code which must be executed
line requires you to execute the configuration file in that repo
line [Pp]lease pass the (?:argument|option) `?trust_remote_code
cause The repository wants to run its own Python code here. Gemma 4 needs none.
change setting MODEL_NAME: as it is -> the checkpoint of google, which loads without code
futile --trust-remote-code: it runs a stranger's program

== python_module_missing | fault | certain
line (?:ModuleNotFoundError|ImportError): No module named '(?P<module>[\w.]+)
line Please install (?P<module>vllm\[\w+\])
cause The Python package {module?named in the line} is not installed in the environment that runs.
change package {module?the package}: missing -> installed into the same environment (same version of
  the engine for extras)
futile another model

== sdk_renamed | root | certain
line No module named 'mcp\.server\.fastmcp
cause The server was written for mcp 1.x: in 2.x FastMCP is called MCPServer and lives elsewhere.
change package mcp: 2.x -> below 2 for that server, or port it to mcp.server.MCPServer
futile reinstalling

== adapter_import | fault | likely
line (?:ImportError|AttributeError): .{0,120}(?:cannot import name|has no attribute) '(?P<name>\w+)'
line ImportError: cannot import name '?(?P<name>\w+)
line got an unexpected keyword argument '(?P<name>\w+)'
cause Two packages of different generations are installed together ({name?see the line}).
change act install the set that the engine's release pins, in one resolution
futile engine flags

== jax_server_refused | root | certain
line jax_server: (?!\s*\d+% |listening on |whoever reaches
  |ended during |cannot listen )\S
unless RESOURCE_EXHAUSTED|Unable to allocate
cause The JAX engine does not take what it was started with; the line names the key, the tensor or
  the option.
change setting MODEL_NAME: as it is -> a Gemma 4 release in bf16 or f32, whole (it computes no other
  model, no quantised weights, and fills no gap)
change flag --max-model-len: as it is -> what the line allows, where it speaks of positions
futile memory flags, and starting it again as it is

== gemma_config_fault | root | likely
line head_dim.{0,80}(?:mismatch|must be equal|shape)|shape '\[[^\]]+\]' is invalid for input of size
line '(?:sliding|full)_attention' is not in list
line (?:mat1 and mat2 shapes cannot be multiplied|The size of tensor a \(\d+\) must match)
cause Shapes do not fit: Gemma 4 has 256-wide heads in sliding layers and 512-wide ones in global
  layers, and code that reads one head_dim for all breaks on it.
change package engine: as it is -> a build that knows both head sizes
futile memory flags
"""
