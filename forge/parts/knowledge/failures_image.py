"""Images and files do not arrive: registries, the Hub, networks, broken and half files.

Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
named.
"""

from __future__ import annotations

IMAGE_SIGNATURES = r"""
== image_rate_limit | root | certain
line toomanyrequests|reached your (?:unauthenticated )?pull rate limit
line \b429 Too Many Requests\b.{0,80}(?:registry|docker|manifests)
cause The registry (Docker Hub) refuses further pulls from this address without an account.
change run docker login
change act pull from a mirror or from your own registry, by digest
futile a larger disk, trying again at once

== image_not_found | root | certain
line manifest (?:for )?(?P<image>[\w./:@-]+)? ?(?:not found|unknown)
line manifest unknown|name unknown: 
line Image '(?P<image>[\w./:@-]+)' not found
cause There is no image {image?of that name} or no such tag in the registry.
change setting image: {image?as it is} -> a tag or digest that the registry lists
futile credentials, where the registry says unknown and not denied

== image_wrong_platform | root | certain
line exec format error|no matching manifest for (?P<platform>[\w/]+)
line manifest type .{0,80}must support amd64/linux
cause The image is built for another processor ({platform?arm64 and amd64 differ}) than the
  machine's.
change flag --platform: as it is -> the machine's own (linux/amd64 or linux/arm64), at the build
futile trying again, more memory

== image_pull_backoff | symptom | likely
line ImagePullBackOff|ErrImagePull|Failed to pull image
cause The cluster cannot pull the image; the registry's own words stand in the event beside it.
change act read the event's message: name, tag, permission or rate limit
futile deleting the pod

== image_pull_network | fault | likely
line (?:pull|registry|docker).{0,160}(?:TLS handshake timeout|i/o timeout|connection refused|reset
  by peer)
line error pulling image.{0,120}(?:timeout|EOF|refused)
line (?:Get|Head) "?https://[\w./-]+/v2/.{0,160}(?:timeout|canceled|EOF|refused|no such host)
cause The registry could not be reached: no way out of the network (no external address and no Cloud
  NAT), a proxy, or a passing fault.
change act give the subnet a way out (Cloud NAT, Private Google Access), or pull through a mirror
futile credentials

== unpack_failed | fault | likely
line failed to register layer|failed to extract layer|error creating overlay mount
unless no space left
cause Docker could not unpack a layer of the image.
change act look for disk, inode and file-system errors (df -h, df -i, dmesg), then pull again
futile another tag of the same image
"""

DOWNLOAD_SIGNATURES = r"""
== hf_repository_not_found | root | certain
line Repository Not Found for url: \S*?huggingface\.co/(?:api/models/)?(?P<model>[\w.-]+/[\w.-]+)
line RepositoryNotFoundError|is not a local folder and is not a valid model identifier
line is not a valid model identifier listed on
line answers 404 .{0,60}check MODEL_NAME
line Repo id must be in the form|HFValidationError
also (?:huggingface\.co/(?:api/models/)?|^|[ '])(?P<model>[\w-]+/[\w.-]+)(?:/resolve| is not a
  local)
cause The Hub has no repository {model?of that name}, or it is private and no token came along (the
  Hub answers both alike).
change setting MODEL_NAME: {model?as it is} -> the exact repository, such as google/gemma-4-E2B-it
change setting HF_TOKEN: not set -> a token that may read it, where it is private
futile a faster network

== hf_revision_not_found | root | certain
line Revision Not Found for url|RevisionNotFoundError|is not a valid git identifier
cause The repository has no such branch, tag or commit.
change flag --revision: as it is -> a commit that the repository lists
futile a token

== hf_file_missing | root | certain
line does not appear to have (?:a file|files) named (?P<file>[\w./ ,()'-]+?)\.(?: Checkout| Please
  |$)
line Entry Not Found for url|EntryNotFoundError
line Error no file named (?P<file>[\w.]+)
line No such file or directory: '(?P<file>[^']*(?:config\.json|safetensors|tokenizer[\w.]*|gguf))'
line (?:Cannot find|Can't find) any (?:model weights|safetensors)
line Cannot find the config file for
line Invalid repository ID or local directory specified
cause The checkpoint lacks {file?a file}: a half-finished download or copy, a GGUF-only repository,
  or the wrong folder.
change act download or copy the whole checkpoint again (config.json, tokenizer files, all shards)
change setting MODEL_NAME: as it is -> the folder that holds config.json
futile engine flags

== hf_offline | root | certain
line Cannot reach \S{0,200} offline mode is enabled
line OfflineModeIsEnabled|LocalEntryNotFoundError|cannot find the requested files in the (?:disk
  |local) cache
line couldn't connect to '?https://huggingface\.co'? to load
near [Oo]ffline|LocalEntryNotFound|cannot find|couldn't connect|outgoing traffic
cause The Hub is not asked or not reachable, and the files are not in the local cache.
change setting HF_HUB_OFFLINE: 1 -> 0 for the download; or download beforehand
change act check the way out of the network, or serve a local folder
futile a token: nobody was asked

== hf_rate_limit | root | certain
line \b429 (?:Client Error|Too Many Requests).{0,80}(?:huggingface|hf\.co)
line HfHubHTTPError: 429
cause The Hub limits requests from this address.
change setting HF_TOKEN: not set -> a token (accounts have a higher limit)
change act wait, and keep the cache between starts
futile engine flags

== hf_server_error | fault | likely
line HfHubHTTPError: 50[0234]
line \b50[0234] Server Error.{0,80}huggingface
cause The Hub failed to answer; nothing is wrong here.
change act try again later, or serve from a mirror or a bucket
futile a token

== download_incomplete | root | certain
line Consistency check failed: file should be of size (?P<wanted>\d+) but has size (?P<found>\d+)
line (?:IncompleteRead|ChunkedEncodingError|ContentTooShort|download.{0,40}incomplete)
line (?:sha256|digest|checksum).{0,40}mismatch
cause A file did not arrive whole (it should have {wanted?more} bytes).
change act remove the partial file and download again: the cache goes on where it stopped
futile a larger card
issue huggingface/huggingface_hub#1498

== dns_failed | fault | likely
line getaddrinfo failed|no such host|nodename nor servname provided
line Temporary failure in name resolution|Name or service not known|Could not resolve host
line lookup \S+ on \S+ (?:server misbehaving|no such host)
cause A host name could not be resolved: no network, no DNS, or no way out of the subnet.
change act check DNS and the way out (Cloud NAT, a proxy) on that machine
futile a token, engine flags

== network_unreachable | fault | likely
line Network is unreachable|No route to host|ConnectTimeoutError|Max retries exceeded with url
cause A server outside could not be reached from that machine.
change act give the machine a way out (Cloud NAT, Private Google Access), or a proxy (HTTPS_PROXY)
futile a token

== gcs_bucket_missing | root | certain
line The specified bucket does not exist|NoSuchBucket|bucket not found
line No URLs matched: gs://(?P<bucket>[\w./-]+)|matched no objects
cause The bucket or the path {bucket?in it} does not exist.
change setting model path: as it is -> an existing object path (gcloud storage ls shows it)
futile roles: a denied bucket answers 403

== pip_no_version | root | certain
line No matching distribution found for (?P<package>[\w.=<>!~\[\],-]+)
line ResolutionImpossible|Cannot install .{0,120}because these package versions have conflicting
line resolver .{0,40}(?:conflict|incompatible)|No solution found when resolving
cause pip finds no set of versions for {package?what is asked}: the range, this Python version or
  this platform excludes all.
change package {package?the requirement}: as it is -> a range that this Python and platform have
futile trying again

== pip_externally_managed | root | certain
line externally-managed-environment
cause The system's Python refuses installs into itself.
change flag pip install: into the system -> --target into a folder of one's own
futile sudo

== ollama_model_missing | root | certain
line model ["'](?P<model>[\w.:/-]+)["'] not found
line pull model manifest: file does not exist
cause Ollama does not have the model {model?asked for} (tags are exact).
change run ollama pull {model}
futile restarting the server

== ollama_too_old | root | certain
line requires a newer version of Ollama|pull model manifest: 412
cause The model needs a newer Ollama than the one installed.
change package ollama: as it is -> newer (upgrade)
futile another quantisation of the same model
"""
