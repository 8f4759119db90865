"""How memory runs out, on cards, chips and hosts: what each program says then, and what helps.

Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
named.
"""

from __future__ import annotations

MEMORY_SIGNATURES = r"""
== kv_cache_too_small | root | certain
line max seq len \((?P<asked>[\d,]+)\) is larger than the maximum number of tokens that can be
  stored in (?:the )?KV cache \((?P<estimated>[\d,]+)\)
line serve at least one request with .{0,40}max seq len \(?(?P<asked>[\d,]+)\)?,
  .{0,10}?(?P<needed>[\d.]+) GiB KV cache is needed.{0,80}?available KV cache memory
  \((?P<available>[\d.]+) GiB\)(?:.{0,80}?estimated maximum model length is (?P<estimated>[\d,]+))?
line larger than the available KV cache memory \((?P<available>[\d.]+) GiB\)
line not enough KV cache (?:memory|space|blocks) .{0,60}max[_ ]model[_ ]len\D{0,12}(?P<asked>\d+)
sum context_that_fits
cause What weights and activations leave for the KV cache cannot hold one request of
  {asked?the asked} tokens; {fits?fewer} tokens fit.
change flag --max-model-len: {asked?the asked length} -> {fits?the length that the message names}
change flag --gpu-memory-utilization: as it is -> up to 0.95, if nothing else uses the card
change flag --kv-cache-dtype: auto -> fp8, where the card has fp8 (half the bytes a token)
futile a lower --max-num-seqs: it is one request that does not fit
issue vllm-project/vllm#10517

== kv_cache_none | root | certain
line No available memory for the cache blocks
line available KV cache memory is (?:negative|non-positive|-[\d.]+)
line (?:kv cache|cache blocks).{0,40}\b(?:num_gpu_blocks|GPU blocks)\W{1,3}0\b
cause Weights and the activation peak, or another process on the card, use up the whole share that
  gpu_memory_utilization allows: nothing is left for the KV cache.
change flag --gpu-memory-utilization: as it is -> up to 0.95, if the card is otherwise empty
change act free the card of other processes (nvidia-smi names them) before raising the share
change flag --max-num-batched-tokens: as it is -> 2048, which lowers the activation peak
change act smaller or quantised weights, if the share is at its limit already
futile a lower share: it leaves even less
issue vllm-project/vllm#10439

== card_in_use_at_start | root | certain
line Free memory on device \S{0,12} ?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less
  than desired GPU memory utilization \((?P<asked>[\d.]+)
line Error in memory profiling\. Initial (?:free|used) memory
cause Another process holds memory of the card: {free?less} of {total?its} GiB are free, and the
  share asked for is {asked?larger}.
sum utilization_free
change act find and stop the other process: nvidia-smi (or rocm-smi) names its pid
change flag --gpu-memory-utilization: {asked?as it is} -> {fits?what is free, as a share}
futile a larger share: the memory is not there

== cuda_oom_weights | root | likely
line (?:CUDA|HIP) out of memory\.? ?(?:Tried to allocate (?P<wanted>[\d.]+ [KMG]iB))?
near line \d+, in (?:make_layers|load_weights|load_model|create_weights|initialize_model)\b
  |make_layers\(|\bin __init__\b[^\n]{0,40}\n[^\n]{0,300}(?:MLP|Attention|Embedding|Linear)\(
unless init_kv_cache|initialize_kv_cache|_allocate_kv_cache|profile_run|_dummy_run|capture_model
cause The weights themselves do not fit: memory ran out while the layers were being built, before
  any KV cache. Quantising at load time comes too late, the full weights are built first.
change act serve a checkpoint that is quantised on disk (w4a16, fp8, q4_0), or a smaller model
change flag --tensor-parallel-size: 1 -> as many cards as there are
futile lowering --max-model-len or the KV cache: neither is allocated yet
futile quantisation of the full checkpoint at load time, CPU offload of the KV cache
issue vllm-project/vllm#16343

== cuda_oom_kv | root | likely
line (?:CUDA|HIP) out of memory\.? ?(?:Tried to allocate (?P<wanted>[\d.]+ [KMG]iB))?
near init_kv_cache|initialize_kv_cache|_allocate_kv_cache
cause Memory ran out while the KV cache was being allocated: something else took what profiling had
  found free.
change flag --gpu-memory-utilization: as it is -> 0.05 lower
change act stop other processes on the card (nvidia-smi)
futile another quantisation of the weights: they are loaded

== cuda_oom_graphs | root | likely
line (?:CUDA|HIP) out of memory\.? ?(?:Tried to allocate (?P<wanted>[\d.]+ [KMG]iB))?
near capture_model|CUDA ?graph capture|cudagraph_capture|Capturing CUDA graph
cause Memory ran out while CUDA graphs were captured, after weights and KV cache were in place.
change flag --gpu-memory-utilization: as it is -> 0.05 lower
change flag --enforce-eager: off -> on (slower decoding, no graphs)
change flag --max-num-seqs: as it is -> half
futile a shorter --max-model-len alone

== cuda_oom | fault | certain
line (?:CUDA|HIP) out of memory\.? ?(?:Tried to allocate (?P<wanted>[\d.]+ [KMG]iB))?
line torch\.(?:cuda\.)?OutOfMemoryError
line CUDA error: out of memory|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY
line CUDA driver error: out of memory
line CUBLAS_STATUS_ALLOC_FAILED
cause The card's memory ran out (asked for {wanted?more}) during the run: activations, KV cache and
  weights together are larger than it.
change flag --max-num-batched-tokens: as it is -> half
change flag --max-num-seqs: as it is -> half
change flag --max-model-len: as it is -> shorter
change act see with nvidia-smi whether another process holds memory of the card
futile retrying with the same values

== tpu_program_load | root | certain
line Attempting to reserve (?P<wanted>[\d.]+[KMG]i?B?) at the bottom of memory\. That was not
  possible\. There are (?P<free>[\d.]+[KMG]i?B?) free
line Attempting to (?:reserve|allocate) (?P<wanted>[\d.]+[KMG]i?B?)\..{0,60}There are
  (?P<free>[\d.]+[KMG]i?B?) free
line Error loading program|RuntimeProgramAllocationFailure
near at the bottom of memory|Error loading program|RuntimeProgramAllocationFailure
also Attempting to (?:reserve|allocate) (?P<wanted>[\d.]+[KMG]i?B?)
also There are (?P<free>[\d.]+[KMG]i?B?) free
sum room_for_programs
cause Compiled programs need room in HBM beside weights and KV cache: {wanted?more} was to be
  reserved and {free?less} was free. The KV cache took too large a share.
change flag --gpu-memory-utilization: as it is -> lower, such as 0.90 (then 0.85): frees
  {lacking?the difference} for programs
change flag --max-num-batched-tokens: as it is -> half, for smaller programs
futile a higher utilisation: it takes even more room away from the programs
issue vllm-project/vllm#16521; vllm-project/tpu-inference#3408

== tpu_hbm_oom | root | certain
line Ran out of memory in memory space hbm.{0,40}?Used (?P<used>[\d.]+[KMGT]) of
  (?P<capacity>[\d.]+[KMGT]) hbm
line Ran out of memory in memory space hbm
line Exceeded hbm capacity by (?P<excess>[\d.]+[KMG])
line (?:program requires|requires) (?P<used>[\d.]+[KMG]) (?:of )?hbm
sum chips_needed
cause The compiled program needs {used?more} of the chip's {capacity?smaller} HBM, {excess?more} too
  much. It is decided at compile time: retrying cannot help.
change place chips: 1 -> {chips?more}, sharded (--tensor-parallel-size)
change flag --max-model-len: as it is -> shorter
change flag --max-num-seqs: as it is -> half
change act weights of fewer bits (fp8, w4a16), or a chip with more HBM
futile retrying, or a longer wait: the error is permanent

== tpu_buffer_oom | root | certain
line Attempting to allocate (?P<wanted>[\d.]+[KMGT]i?B?)\. That was not possible\. There are
  (?P<free>[\d.]+[KMGT]i?B?) free
line Error allocating device buffer
line Failed to allocate (?:request for )?(?P<wanted>[\d.]+ ?[KMGT]i?B).{0,60}on device ordinal
line RESOURCE_EXHAUSTED: Out of memory while trying to allocate (?P<wanted>\d+) bytes
unless Error loading program|RuntimeProgramAllocation|at the bottom of memory
cause Device memory ran out at run time: {wanted?more} was asked for and {free?less} was free.
  Weights, KV cache and donated buffers together are larger than the chip's HBM.
change flag --max-num-seqs: as it is -> half
change flag --gpu-memory-utilization: as it is -> 0.05 to 0.10 lower
change setting XLA_PYTHON_CLIENT_MEM_FRACTION: 0.75 -> 0.90 (JAX alone on the device)
futile kernel block sizes: this is HBM, not vmem

== tpu_vmem_oom | root | certain
line Ran out of memory in memory space vmem
line (?:scoped )?vmem.{0,60}(?:limit|allocation).{0,40}exceed
line exceed(?:ed|s)? .{0,40}vmem
cause A kernel's scratch memory on the chip (vmem) is too small for its block sizes. It is not HBM.
change act an engine build whose kernels know this chip's vmem limit, or smaller kernel blocks
change setting LIBTPU_INIT_ARGS: as it is -> --xla_tpu_scoped_vmem_limit_kib raised (65536)
change flag --max-model-len: as it is -> shorter (a workaround that some builds need)
futile more chips, weights of fewer bits, a smaller KV cache: they free HBM
issue pytorch/xla#9524; vllm-project/vllm#19490

== tpu_smem_oom | root | certain
line Ran out of memory in memory space smem
cause A kernel's scalar memory (smem) is too small for its tables: too many pages a sequence.
change flag --block-size: as it is -> 128 or more (fewer pages)
change flag --max-num-seqs: as it is -> half
futile freeing HBM: smem is another memory

== triton_shared_memory | root | certain
line shared memory, Required: (?P<needed>\d+), Hardware limit: (?P<limit>\d+)
line Required: ?(?P<needed>\d+),? Hardware limit: ?(?P<limit>\d+).{0,60}shared memory
line out of resource: shared memory
line (?:too much|insufficient) shared (?:memory|data) .{0,60}(?P<needed>0x[0-9a-f]+|\d+) bytes
line uses too much shared data \((?P<needed>0x[0-9a-f]+)
line local memory \((?P<needed>\d+)\) exceeds limit \((?P<limit>\d+)\)
cause A kernel asks {needed?more} bytes of shared memory a block, and the card's limit is
  {limit?smaller}. Gemma 4's global layers have head_dim 512; Turing (compute capability 7.5) has
  64 KiB of shared memory (LDS on ROCm). It is not VRAM.
change act a build with the tile clamp (TILE_SIZE 32 -> 16 for head_dim >= 512), vLLM PR #39018
change setting VLLM_TRITON_USE_TD: 0 -> 1 together with --block-size 16 (vLLM 0.32)
change act another runtime (llama.cpp), or a card of compute capability 8.0 or newer
futile memory flags (--gpu-memory-utilization, --max-model-len): VRAM is not what is short
futile num_stages and num_warps: they do not change this kernel's need
issue vllm-project/vllm#57712 (fix: PR #39018); ROCm/vllm#919

== cloud_run_host_memory | root | certain
line Memory limit of (?P<limit>[\d.]+) ?MiB exceeded with (?P<used>[\d.]+) ?MiB used
line The container instance (?:exceeded|was found to be using too much) memory
sum memory_limit
cause The host memory of the Cloud Run instance ran out ({used?more} MiB of {limit?fewer} MiB), not
  the GPU's. Files in memory (/tmp) count against the memory limit.
change flag --memory: {limit?as it is}Mi -> {fits?twice as much}, with the --cpu that it demands
change act do not copy the checkpoint to /tmp: mount the bucket, or stream the weights
futile GPU flags: VRAM is not what ran out

== host_oom_killed | root | certain
line Out of memory: Kill(?:ed)? process (?P<pid>\d+) \(?(?P<name>[\w.:/-]+)\)?
line oom-kill:constraint=\w+|oom_reaper: reaped process|Memory cgroup out of memory
line invoked oom-killer
line \bOOMKilled\b(?!\W{1,4}false)
line Failed with result 'oom-kill'|A process of this unit has been killed by the OOM killer
cause The kernel's OOM killer ended {name?the process} (pid {pid?unknown}): host memory, or the
  memory limit of its container, ran out.
change act more host memory (or a higher container limit), or a smaller model
change flag --max-model-len: as it is -> shorter, for engines whose cache is in host memory
change act add swap only to survive the load: decoding from swap is not usable
futile GPU memory flags: it is host memory

== gloo_or_shm_small | root | likely
line No space left on device.{0,80}/dev/shm|/dev/shm.{0,80}No space left on device
line Bus error.{0,80}(?:shm|shared memory)
line insufficient shared memory \(shm\)
line Error while creating shared memory segment
cause The container's shared memory (/dev/shm, 64 MiB by default in Docker) is full.
change flag --shm-size: 64m -> 8g (docker run), or --ipc=host
futile a larger boot disk: /dev/shm is memory
issue pytorch/pytorch#5040

== system_memory_too_small | root | certain
line model requires more system memory \((?P<needed>[\d.]+ [KMG]iB)\) than is available
  \((?P<free>[\d.]+ [KMG]iB)\)
line model requires more system memory
cause Ollama refuses the model: it needs {needed?more} of system memory and {free?less} is free.
change act a smaller tag or quantisation, or a shorter context (num_ctx)
change act free memory, or use a machine with more
futile pulling the model again

== llamacpp_alloc_failed | root | certain
line (?:cudaMalloc|hipMalloc) failed: out of memory
line unable to allocate (?P<buffer>\w+) buffer
line failed to allocate (?:compute|\w+) buffers?|allocating (?P<wanted>[\d.]+) MiB on device \d+
line failed to (?:initialize|create) (?:the )?context.{0,60}(?:memory|allocate)
line ErrorOutOfDeviceMemory|Device memory allocation of size \d+ failed
cause llama.cpp could not allocate a buffer ({buffer?see the line}) on the device: layers, context
  and compute buffers together are larger than it.
change flag --n-gpu-layers: all -> fewer, until it fits (or 0)
change flag --ctx-size: as it is -> shorter
change flag --cache-type-k: f16 -> q8_0, and --cache-type-v too
futile more host memory, where layers were meant for the card

== runner_killed | symptom | likely
line (?:runner|server) process (?:has )?terminated: signal: killed
line (?:terminated by|received|exited with|Terminating on) (?:signal )?SIGKILL
line exit(?:ed)? (?:status|code|with)(?: code)?\W{0,3}137\b
line \bexit code: 137\b|returned non-zero exit status 137|died with <Signals\.SIGKILL
line code=killed, status=9/KILL
line Worker proc \S+ died unexpectedly \(exit code: (?:-9|None)\)
cause The process was killed from outside (SIGKILL, 137): most often by the kernel's OOM killer,
  while the model was being loaded or at a peak of its memory.
change act look for the killer: dmesg (or journalctl -k) names it, with the memory at that time
change act a smaller model or context, fewer parallel slots, or more memory
futile restarting with the same values

== ended_silently | symptom | likely
line the model server \S+ (?:\(pid \d+\) )?has ended\b
cause The model server is gone and its log gives no reason: it was killed from outside (SIGKILL),
  most often by the kernel's OOM killer, or by somebody's kill.
change act look for the killer: dmesg (or journalctl -k) names it, with the memory at that time
change act a smaller model or context, fewer parallel slots, or more memory
futile looking for the cause in the engine's own log: a killed process writes nothing

== jax_cpu_oom | root | likely
line (?:DefaultCPUAllocator|mmap).{0,60}(?:not enough|can't allocate|Cannot allocate) memory
line DefaultCPUAllocator: can't allocate memory: you tried to allocate (?P<wanted>\d+) bytes
line RESOURCE_EXHAUSTED: Out of memory allocating (?P<wanted>\d+) bytes
line MemoryError: Unable to allocate (?P<wanted>[\d.]+ ?[KMGT]iB)
line OSError: \[Errno 12\] Cannot allocate memory
line std::bad_alloc|^\s*MemoryError\b
line runtime: out of memory
cause The process asked for more host memory than there is.
change act a smaller model, a number format of fewer bits, or a machine with more memory
change flag --max-model-len: as it is -> shorter
futile GPU memory flags

== neuron_device_oom | root | certain
line (?:NRT_RESOURCE|nrt_tensor_allocate|TDRV).{0,120}(?:Failed to allocate|out of memory
  |insufficient)
line Failed to allocate (?P<wanted>\d+) bytes on (?:ND|NC|device)
line exceeds HBM limit of
cause The NeuronCore's device memory (16 GiB on Inferentia 2) ran out.
change act shard over more NeuronCores, or a smaller sequence length or batch in the traced graph
change act keep the embedding tables on the host
futile host memory or swap

== neuron_compiler_killed | root | certain
line \[F137\] neuronx?-cc was forcibly killed
line neuronx?-cc (?:was )?(?:killed|terminated).{0,60}(?:memory|signal 9)
cause The Neuron compiler was killed: host memory ran out while the graph was being compiled.
change act compile on a machine with more memory, or add swap for the compilation
change setting NEURON_CC_FLAGS: as it is -> --optlevel=1, and fewer parallel compilations
futile device memory settings: it is the host

== mlx_or_metal_oom | root | certain
line (?:\[metal::malloc\]|Metal).{0,60}(?:Attempting to allocate|Insufficient Memory|out of memory)
line kIOGPUCommandBufferCallbackErrorOutOfMemory
cause The unified memory that Metal may use ran out.
change act a smaller model, quantisation or context
futile swap: wired memory cannot be swapped
"""
