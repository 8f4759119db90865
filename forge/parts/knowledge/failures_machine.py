"""What a rented machine's own boot says: its GPU, its compilers, its source, the step that failed.

Data for the failure bank, in its grammar. Sources: the boot programs' own words, and
what cmake, nvcc, g++ and pip wrote when they failed for want of a compiler, memory or a hash.
"""

from __future__ import annotations

MACHINE_SIGNATURES = r"""
== gpu_of_another_arch | root | certain
line the GPU is an? (?P<card>.{1,60}) of compute capability (?P<found>\d+\.\d), this rig is for
  (?P<needed>\d+\.\d)
cause The machine's GPU is {card?another one} ({found?of another architecture}); what this rig
  builds or pulls is for {needed?GPU_ARCH}.
change setting INSTANCE_TYPE: as it is -> one whose GPU has compute capability {needed?GPU_ARCH}
change setting GPU_ARCH: {needed?as it is} -> {found?the GPU's}, with CHIP, where this GPU is meant
futile another driver, building again

== cuda_toolkit_missing | root | certain
line nvcc is not on this machine
line No CMAKE_CUDA_COMPILER could be found
line Failed to find nvcc|Could not find nvcc, please set CUDAToolkit_ROOT
cause There is no CUDA compiler to build with: the machine image has a driver at most.
change setting AMI_PARAMETER: as it is -> an image that has NVIDIA's driver and the CUDA toolkit
futile building again, another driver

== built_program_sees_no_gpu | root | likely
line the program that was built sees no GPU
line found no GPU and computes on the processor
line ggml_cuda_init: failed to initialize CUDA: (?P<why>[\w -]+)
cause llama-server was built and does not see the GPU ({why?its driver and its CUDA do not fit}).
change act compare verify_gpu_arch(): the driver's CUDA must not be older than the toolkit's
change act stop and start the machine, where the driver was there at the build
futile memory flags, other weights

== compiler_killed | root | certain
line Killed signal terminated program (?P<name>[\w.+-]+)
line (?P<name>cc1plus|cicc|ptxas|nvcc).{0,40}(?:died due to signal 9|Killed)\b
line virtual memory exhausted: Cannot allocate memory
cause The kernel ended the compiler {name?} for memory.
change setting INSTANCE_TYPE: as it is -> the next size, with twice the memory
change act leave the disk room for the swap file that a build makes where memory is short
futile building again on the same machine, GPU memory flags

== source_does_not_compile | root | likely
line (?P<file>[\w./+-]+\.(?:cuh?|cpp|cc?|hp?p?))(?:\(\d+\)|:\d+(?::\d+)?): (?:fatal )?error:
  (?P<why>.{1,120})
unless No space left|Killed signal
cause The compiler refuses {file?a file} ({why?its message}): this source, this toolkit and these
  flags do not go together.
change setting AMI_PARAMETER: as it is -> an image with the CUDA toolkit that the source was tried
  with
change act compare the toolkit in get_build_progress() with the one in this rig's README
futile building again, more memory

== pip_hash_mismatch | root | certain
line THESE PACKAGES DO NOT MATCH THE HASHES
line what pip fetched as (?P<package>[\w.=-]+) is not the archive
cause What the package index gave for {package?a package} is not the file that was pinned by hash.
change act look at the index: a mirror that changes files, or one that was tampered with
futile building again without the hash: then nobody knows what is run

== weights_of_another_hash | root | certain
line (?P<file>[\w.-]+) came, and is not the file of that size and hash
cause {file?The file} was fetched whole, and is not the file that was asked for.
change setting MODEL_SHA256: as it is -> the file's own, where another was meant
change act start the model server again: what came was thrown away
futile a token

== weights_file_unclear | root | certain
line has no one such file \((?P<files>[^)]{0,200})\)
line the Hub tells no size and hash of (?P<files>[\w.-]+)
cause The repository has no single file that is meant ({files?see the message}).
change setting MODEL_FILE: as it is -> the one to serve, of those in the repository
change setting MODEL_SHA256: as it is -> the file's own, where the Hub tells none
futile a token, downloading again

== boot_step_failed | echo | likely
line GEMMA4-BOOT (?P<phase>[a-z]+) failed \d+ (?P<why>.{1,200})
cause The machine's boot stopped in its phase {phase?of that name}: {why?see the line}.
change act see to what the line says, then start the model server again
futile waiting: nothing goes on by itself
"""
