"""The machine and its drivers come up wrong, and the container around the engine does not start.

Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
named.
"""

from __future__ import annotations

BOOT_SIGNATURES = r"""
== driver_too_old | root | certain
line NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)
line CUDA driver version is insufficient for CUDA runtime version
line unsatisfied condition: cuda>=(?P<needed>[\d.]+)
line (?:forward compatibility was attempted on non supported HW|system has unsupported display
  driver)
line This (?:program|build) .{0,60}requires (?:a )?driver (?:version )?(?P<needed>[\d.]+)
line PTX was compiled with an unsupported toolchain
cause The GPU driver (CUDA {found?version in the message}) is older than what the engine was built
  for.
change package NVIDIA driver: as it is -> 580 or newer for CUDA 13 (525 or newer for CUDA 12)
change package torch and vllm: as they are -> builds for the driver's CUDA (cu12x)
futile another model, memory flags
issue modelscope/FunASR#2973

== nvidia_driver_missing | root | likely
line NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver
line Failed to initialize NVML: (?P<why>[\w /]+)
line nvidia-container-cli: initialization error: (?:nvml error: )?(?P<why>[\w ]+)
line Found no NVIDIA driver on your system
line nvidia-smi (?:is not on this machine|names no GPU)|nvidia-smi.{0,80}: No devices were found
line (?:libnvidia-ml|libcuda)\.so(?:\.1)?: cannot open shared object file
cause The NVIDIA driver is not loaded (not installed, built for another kernel, or another
  version than its libraries after an update).
change act install or reload the driver; after an update without a reboot: reboot
futile reinstalling torch

== nvidia_container_toolkit_missing | root | certain
line could not select device driver "?\\?"?"? with capabilities: \[\[gpu
line could not select device driver
line (?:unknown or invalid runtime name|unknown runtime specified): nvidia
line nvidia-container-runtime.{0,40}(?:not found|no such file)
line could not load NVML library: .{0,40}inside container
line failed to (?:discover GPU|inject CDI devices): .{0,80}nvidia\.com/gpu
cause Docker has no NVIDIA runtime: nvidia-container-toolkit is not installed or not configured.
change package nvidia-container-toolkit: missing -> installed
change run sudo nvidia-ctk runtime configure --runtime=docker
change run sudo systemctl restart docker
futile a newer driver, another image
issue OpenBMB/XAgent#273

== no_accelerator | root | certain
line Failed to infer device type|Device string must not be empty
line No CUDA GPUs are available|no CUDA-capable device is detected
line No visible GPU devices|RuntimeError: No GPU found
line Torch not compiled with CUDA enabled
line No HIP GPUs are available|no ROCm-capable device is detected
line Cannot access accelerator device when none is available
line torch\.cuda\.is_available\(\) (?:is|returned) False
cause The engine found no accelerator: none in the container, the wrong image for this hardware, or
  a machine without one.
change flag --gpus: missing -> all (docker run; --device /dev/kfd --device /dev/dri on ROCm)
change act the image for this hardware (CUDA, ROCm, TPU), or the CPU build on a CPU machine
futile memory flags
issue odysseus-dev/odysseus#778

== rocm_device_access | root | certain
line Unable to open /dev/kfd|/dev/kfd.{0,40}(?:[Pp]ermission denied|No such file)
line HSA_STATUS_ERROR_OUT_OF_RESOURCES|hsa_init.{0,40}(?:Failed|failed)
cause The process may not open the ROCm devices.
change flag --device: missing -> /dev/kfd and /dev/dri (docker run), with --group-add video and
  render
futile a newer ROCm

== gpu_fell_off | root | certain
line GPU has fallen off the bus|NVRM: Xid \([^)]*\): (?P<xid>\d+)
line Unable to determine the device handle for GPU.{0,80}(?:Unknown Error|GPU is lost)
line uncorrectable ECC error
cause The card itself failed (Xid {xid?see the log}): hardware or driver, not the engine.
change act stop and start the machine, which usually moves it to another host; then another machine
futile engine flags

== no_kernel_image | root | certain
line no kernel image is available for execution on the device
line hipErrorNoBinaryForGpu|no binary for GPU|invalid device function
line rocBLAS error: Cannot read .{0,200}(?P<sm>gfx\w+)|TensileLibrary\w*\.dat
line CUDA capability (?P<sm>sm_\d+|\d[ .]\d) is not (?:compatible|supported)
line (?:device kernel image is invalid|not compiled (?:with|for) (?:CUDA )?(?:arch|SM))
also CUDA capability (?P<sm>sm_\d+|\d[ .]\d)
cause The binary holds no code compiled for this card's architecture ({sm?sm_75 on Turing, 7.5}).
change act an image or wheel compiled for this architecture, or a build with its arch in
  TORCH_CUDA_ARCH_LIST
futile CUDA_LAUNCH_BLOCKING: the place in the stack trace is not to be trusted either way
issue predibase/lorax#535; open-mmlab/mmdetection#2108

== gpu_capability_low | root | certain
line (?:FlashAttention|Flash Attention V?2?).{0,60}(?:only supports|not supported
  |requires).{0,60}(?:Ampere|capability|GPU)
line with CUDA capability (?P<sm>\d \d) is not supported for Flash
line (?:requires|minimum) (?:compute )?capability (?:of )?(?:at least )?(?P<needed>\d+\.?\d*)
line No available kernel\. Aborting
unless no kernel image is available
cause The card's compute capability ({sm?below 8.0}) is too low for this kernel.
change flag --attention-backend: as it is -> TRITON_ATTN (or another runtime, such as llama.cpp)
change place card: as it is -> compute capability {needed?8.0} or newer
futile memory flags

== dtype_unsupported | root | certain
line Bfloat16 is only supported on GPUs with compute capability of at least (?P<needed>[\d.]+)\.
  Your (?P<card>[\w ]+) GPU has compute capability (?P<sm>[\d.]+)
line [Bb](?:f|float)16 is (?:only supported|not supported) on
line (?:fp8|float8).{0,60}(?:only supported|not supported|requires).{0,60}capability
cause {card?The card} (compute capability {sm?below 8.0}) has no arithmetic for this number format.
change flag --dtype: bfloat16 -> half (float16; float32 where Gemma overflows in float16)
change place card: {card?as it is} -> compute capability 8.0 or newer
futile memory flags
issue substratusai/vllm-docker#37

== tpu_busy | root | certain
line TPU is already in use by process with pid (?P<pid>\d+)
line libtpu (?:multi-process )?lockfile|/tmp/libtpu_lockfile
line open\(/dev/(?:accel|vfio)\S*\): (?:Device or resource busy|Operation not permitted)
line TPU (?:device|backend).{0,40}(?:already in use|resource busy)
cause Another process (pid {pid?unknown}) holds the chip: an older server, a notebook, an orphaned
  worker; or a lock was left by one that was aborted.
change act find and stop that process (pid {pid?: lsof /dev/accel* /dev/vfio/*})
change act only where no such process exists: remove /tmp/libtpu_lockfile
change setting JAX_PLATFORMS: as it is -> cpu, for tests that need no chip
futile reinstalling libtpu
issue jax-ml/jax#10192, #13260

== tpu_topology_mismatch | root | certain
line Expected (?P<wanted>\d+) worker addresses, got (?P<found>\d+)
line (?:TPU_CHIPS_PER_HOST_BOUNDS|TPU_HOST_BOUNDS|TPU topology).{0,80}(?:mismatch|invalid|does not
  match)
cause The TPU's environment describes another slice than this machine is: {wanted?more} workers are
  expected and {found?others} named.
change setting TPU_WORKER_HOSTNAMES: as it is -> one name for each worker (localhost for one host)
change setting TPU_ACCELERATOR_TYPE: as it is -> the machine's own, such as v6e-1
futile memory flags, another image

== tpu_not_found | root | certain
line No jellyfish device found|Failed to get global TPU topology
line No TPU (?:devices?|platform|hardware) (?:found|available|detected)
line TPU initialization failed
line Failed to open libtpu
unless already in use|lockfile|busy
cause libtpu finds no TPU on this machine (no chip, chip not given to the container, or no TPU
  environment).
change flag --privileged: missing -> set (docker run on a TPU VM), with --net=host
change setting TPU_SKIP_MDS_QUERY: unset -> 1 where there is no metadata server
change act check /dev/accel* or /dev/vfio on the host
futile memory flags

== metadata_unreachable | fault | likely
line Failed to fetch URL after \d+ tries .{0,40}http status
cause libtpu asks the metadata server for the TPU's environment and gets none: half a minute for
  each key, off Google's machines for nothing.
change setting TPU_SKIP_MDS_QUERY: unset -> 1
futile longer start-up times

== jax_no_backend | fault | likely
line Unable to initialize backend '(?P<backend>\w+)'
line Backend '?(?P<backend>\w+)'? (?:failed to initialize|is not in the list of known backends)
line jaxlib version (?P<found>[\d.]+) is (?:newer|older) than
line libtpu.{0,40}(?:version mismatch|incompatible|not compatible)
cause JAX cannot use its backend {backend?}: plug-in and JAX do not fit each other, or the device is
  held or missing (the words after the colon say which).
change package jax, jaxlib and libtpu: as they are -> one release's set, installed together
futile memory flags

== neuron_busy | root | likely
line No neuron device available|cannot determine the number of available NeuronCores
line Neuron runtime cannot be initialized|NRT_INIT|nrt_init.{0,40}(?:failed|error)
line NeuronCores?.{0,60}(?:already in use|not available|in use by)
line Neuron Cores?\(s\) not available
cause No NeuronCore is free: cores belong to one process at a time and a leftover process owns them,
  or the driver is not loaded.
change run neuron-ls
change act stop the leftover process that it names; load the driver (modprobe neuron) if none is
  shown
futile smaller models: no core was opened
issue aws-neuron/aws-neuron-samples#44

== cudnn_failed | root | likely
line CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|VERSION_MISMATCH)
line DNN library initialization failed
cause cuDNN could not be initialised: no memory is left on the card for it, or its version is not
  the one that the engine was built with.
change setting XLA_PYTHON_CLIENT_MEM_FRACTION: 0.75 -> 0.60 (--gpu-memory-utilization lower in vLLM)
change package nvidia-cudnn: as it is -> the version that torch or jaxlib pins
futile another model

== cuda_forked | root | certain
line Cannot re-initialize CUDA in forked subprocess
cause A worker was forked after CUDA had been used in its parent.
change setting VLLM_WORKER_MULTIPROC_METHOD: fork -> spawn
futile memory flags, another driver

== library_missing | root | likely
line (?P<library>lib(?!nvidia-ml|tpu|cuda\.so)[\w+-]+\.so[\d.]*): cannot open shared object file
line undefined symbol: (?P<symbol>\w+)
line (?:version `|version ')(?P<library>GLIBC(?:XX)?_[\d.]+)' not found
line operator torchvision::nms does not exist|Could not load.{0,40}libtorchcodec
cause A native library is missing or of another build ({library?a symbol is undefined}): packages of
  different builds are mixed.
change act install matching builds together (torch, torchvision, torchaudio and engine of one
  index), or uninstall those that the engine does not need
futile flags of the engine

== cpu_instruction_missing | root | likely
line Illegal instruction|SIGILL|invalid opcode in
cause The binary uses instructions that this processor lacks (AVX2, AVX-512).
change act a build for this processor (llama.cpp with its CPU variants, or built on the spot)
change setting OPENBLAS_CORETYPE: as it is -> Haswell, where the crash is in OpenBLAS
futile more memory

== disk_full | root | certain
line no space left on device
line \[Errno 28\]|\bENOSPC\b|No space left|disk (?:is )?full|Disk quota exceeded
line not enough (?:free )?disk space|There is not enough space on the disk
line no space: .{0,40}[\d.]+ GB.{0,20} are free
unless /dev/shm
cause The disk is full: the image needs room for its layers and their extraction, the model for its
  files, and both were on a boot disk that is too small.
change flag --boot-disk-size: as it is -> 200GB (at creation)
change setting HF_HOME: as it is -> a folder on a larger disk
change act docker system prune frees something only where old images lie about
futile more memory, trying again
issue NVIDIA-NeMo/Speech#1029; NVIDIA/nvidia-docker#792

== disk_type_refused | root | certain
line \[?(?P<type>pd-[\w-]+)\]? .{0,60}(?:not compatible|not supported|cannot be used)
line features are not compatible for creating instance
cause This machine type does not take the disk type {type?asked for} (ct6e wants Hyperdisk).
change flag --boot-disk-type: {type?as it is} -> hyperdisk-balanced
futile other zones

== container_command_missing | root | certain
line exec: "?(?P<command>[\w./-]+)"?: (?:executable file not found in|stat .{0,80}no such file)
line unable to start container process
cause The image has no command {command?of that name}: another image than meant, or an entry point
  that the arguments replace.
change setting container command: {command?as it is} -> what the image's entry point expects
  (arguments only, for vllm/vllm-openai)
futile restarting Docker, a larger disk

== docker_not_running | root | certain
line Cannot connect to the Docker daemon|Is the docker daemon running
line docker: command not found|docker: not found|exec: "?docker"?: executable file not found
cause Docker is not running (or not installed) on this machine.
change run sudo systemctl start docker
change act install Docker where the image brings none (accelerator images of Compute Engine)
futile another container image

== container_name_taken | root | certain
line container name "?/?(?P<name>[\w.-]+)"? is already in use
cause A container of the name {name?} exists already, running or stopped.
change act stop and remove the old container (or give the new one another name): a person decides
futile restarting Docker

== apt_locked | fault | certain
line (?<!cache lock: )Could not get lock /var/lib/(?:dpkg|apt)
line Unable to acquire the dpkg frontend lock|is another process using it
cause Another package manager run (unattended upgrades at boot) holds the lock.
change setting apt-get -o DPkg::Lock::Timeout: 0 -> 600, so that it waits
futile removing the lock file

== startup_script_failed | symptom | likely
line startup-script.{0,40}exit status (?P<status>[1-9]\d*)|Script "startup-script" failed
line (?:cloud-init|cc_scripts_user).{0,60}(?:Failed to run|RuntimeError)
cause The start-up script ended with status {status?other than 0}; why stands above it.
change act read the lines before this one: get_boot_timeline and the serial log hold them
futile waiting: the script runs once a boot

== systemd_restart_limit | symptom | certain
line Start request repeated too quickly|start-limit-hit
cause systemd gave up restarting the service: each start failed in the same way.
change act find the first failure above; then "systemctl reset-failed" and start once
futile a higher restart limit

== too_many_open_files | root | certain
line Too many open files|\[Errno 24\]
cause The process ran out of file descriptors.
change flag --ulimit: nofile=1024 -> nofile=65536 (docker run; LimitNOFILE in a unit)
futile more memory

== clock_or_tls | root | likely
line CERTIFICATE_VERIFY_FAILED|certificate (?:has expired|is not yet valid)|x509: certificate
cause TLS certificates are not accepted: a proxy with its own authority, an old bundle, or a wrong
  clock.
change setting SSL_CERT_FILE: as it is -> the bundle that holds the proxy's authority
change act check the clock (timedatectl)
futile switching verification off
"""
