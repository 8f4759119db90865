"""The client and its way to the machine: MCP over stdio, SSM, SSH, names that do not exist.

Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
named.
"""

from __future__ import annotations

CLIENT_SIGNATURES = r"""
== mcp_stdout_noise | root | certain | any level
line (?:Unexpected token|Unexpected identifier|Unexpected non-whitespace).{0,120}is not valid JSON
line (?:Failed to parse|invalid|Invalid) (?:JSONRPC|JSON-RPC) message
line not valid JSON.{0,60}(?:server|stdout)
near MCP|mcp|JSON-?RPC|stdio
cause The MCP server prints to stdout, where the stdio transport allows JSON-RPC only.
change act send every log line and banner to stderr, nothing but messages to stdout
futile the client's time-outs
issue homeassistant-ai/ha-mcp#603

== mcp_command_not_found | root | certain | any level
line spawn (?P<command>[\w./-]+) ENOENT
line (?:command not found|No such file or directory|executable file not found).{0,60}(?:mcp
  |server\.py)
line Failed to (?:spawn|start) (?:MCP )?server.{0,60}(?:not found|ENOENT)
cause The client's PATH has no command {command?of that name} (a graphical client inherits no shell
  profile).
change setting command (in the MCP config): {command?as it is} -> its absolute path (python3 and
  server.py as well)
futile time-outs, reinstalling the client
issue mark3labs/mcp-filesystem-server#6

== mcp_timeout | root | likely | any level
line Connection failed after (?P<ms>6\d{4})ms
line MCP error -32001|-32001: Request timed out
line (?:MCP|mcp).{0,80}(?:Request timed out|timed out after (?P<ms>\d+))
line Timed out while waiting for response to ClientRequest
cause The server did not answer within the client's limit (60 s, whatever MCP_TIMEOUT says): slow
  imports or cloud calls at startup, or a long tool call.
change act answer initialize at once: heavy imports and cloud calls out of the startup
change act long work as a job that is polled, with progress notifications
futile a larger MCP_TIMEOUT: the client caps it at 60 s
issue anthropics/claude-code#16837

== mcp_connection_closed | symptom | likely | any level
line MCP error -32000|-32000: Connection closed
line Server transport closed unexpectedly
line (?:mcp|MCP).{0,60}(?:stdin end|server (?:exited|disconnected|process exited))
cause The server process exited (or its stdin was closed) before or during initialize: an import
  error, a wrong interpreter, a missing variable, or a client that closed stdin.
change act run the configured command by hand and read the child's stderr
change setting command (in the MCP config): as it is -> an absolute interpreter path, with an env
  block for what it needs
futile time-outs
issue anthropics/claude-code#30147

== ssm_not_connected | root | certain
line TargetNotConnected|\((?P<instance>i-\w+) is not connected
line (?P<instance>i-[0-9a-zA-Z]+) is not connected
line InvalidInstanceId.{0,160}not in a valid state
cause The SSM agent of {instance?the instance} is not online: still booting, no instance profile
  with AmazonSSMManagedInstanceCore, no route to SSM, stopped, or another region.
change act wait for PingStatus Online (aws ssm describe-instance-information)
change grant AmazonSSMManagedInstanceCore: missing -> in the instance profile's role
change act check region and profile of the call
futile security-group rules for port 22: the agent calls out
issue aws/session-manager-plugin#5; jupyter-infra/jupyter-deploy#176

== ssh_timeout | fault | likely
line (?:ssh|port 22).{0,80}(?:Connection timed out|Operation timed out)
line connect to host \S+ port 22: (?:Connection|Operation) timed out
line Could not SSH into the instance
cause Port 22 does not answer: no firewall rule for this source, no external address, or the machine
  is still booting.
change flag --tunnel-through-iap: off -> on (with tcp:22 open from 35.235.240.0/20)
futile keys: nobody was asked for one

== resource_not_found | fault | likely
line The resource '(?P<resource>[\w./-]+)' was not found
line InvalidInstanceID\.NotFound|Cannot find service \[(?P<resource>[\w-]+)
line Service \[(?P<resource>[\w-]+)\] could not be found
line InvalidAMIID\.(?:NotFound|Malformed)|InvalidSubnetID\.NotFound|InvalidGroup\.NotFound
cause The resource {resource?named in the line} does not exist in this project, region or zone
  (right after a creation: not yet).
change place zone: as it is -> the resource's own; list it first
futile roles: a denied one answers 403

== resource_exists | fault | certain
line The resource '(?P<resource>[\w./-]+)' already exists
line \bALREADY_EXISTS\b|IdempotentParameterMismatch
cause A resource of that name exists already, perhaps from an earlier call that timed out.
change act look at the existing one first: it may be yours, and running
futile another zone: that makes a second one

== aws_no_region | root | certain
line NoRegionError|You must specify a region
cause The AWS call names no region.
change setting AWS_REGION: unset -> the rig's region
futile credentials

== do_image | root | certain
line The image you requested was not found|invalid image for Droplet
cause DigitalOcean has no image of that name for this region or droplet.
change setting image: as it is -> a slug that GET /v2/images lists
futile another size

== invalid_iam_profile | root | likely
line Invalid IAM Instance Profile name|iamInstanceProfile.{0,60}[Ii]nvalid
cause The instance profile does not exist, or is too new to be known everywhere.
change act create it; right after that wait half a minute and repeat the call
futile another instance type

== endpoint_auth_proxy | root | likely
line litellm\.(?:AuthenticationError|NotFoundError|BadRequestError)
line LiteLLM.{0,80}(?:No (?:deployments|model)|Invalid model name)
cause LiteLLM does not reach the model under the name or key that it was given.
change setting model (litellm_config.yaml): as it is -> openai/NAME, as /v1/models lists it
change setting api_base: as it is -> the endpoint with /v1
futile restarting the model server
"""
