"""Kernels and graphs do not compile: Mosaic, Triton, inductor, XLA, Neuron, their caches.

Data for the failure bank, in its grammar. Sources: the programs' own message texts and the issues
named.
"""

from __future__ import annotations

COMPILE_SIGNATURES = r"""
== mosaic_compile_failed | root | certain
line Mosaic failed to compile
line (?:tpu_custom_call|Mosaic|Pallas).{0,160}(?:failed to (?:compile|lower)|not (?:implemented
  |supported)|unsupported)
unless memory space (?:hbm|vmem|smem)
cause A Pallas (Mosaic) kernel does not compile for this chip generation: a shape or layout that the
  kernel or libtpu does not handle. Not memory.
change package vllm, tpu-inference and libtpu: as they are -> one release's set (a pinned image
  digest that was tried on this chip)
change flag --block-size: as it is -> another page size (128)
futile --enforce-eager: kernels are compiled all the same; memory flags
issue vllm-project/tpu-inference#1425, #898

== xla_compile_failed | fault | likely
line XLA:TPU compile permanent error
line (?:XlaRuntimeError|JaxRuntimeError): (?:INTERNAL|UNIMPLEMENTED|INVALID_ARGUMENT): (?P<why>[\w
  ,.'-]+)
line INTERNAL: (?:Mosaic|Failed to compile|during context)
unless Ran out of memory|Mosaic failed
cause XLA refuses the program ({why?see the line}). 'Permanent' means that a retry cannot help.
change package jax, jaxlib and libtpu: as they are -> one release's set
change act make the failing shape smaller (batch, sequence) to find what it objects to
futile retrying

== compile_cache_stale | root | likely
line (?:incompatible|version mismatch|failed to deserialize).{0,120}(?:compilation cache|serialized
  executable|cached executable)
line (?:compilation cache|serialized executable|cached (?:executable|graph)).{0,120}(?:incompatible
  |mismatch|corrupt|failed to)
line proto deserialization failed
cause A compiled program in the cache was made by another build, or is damaged.
change setting JAX_COMPILATION_CACHE_DIR: as it is -> a folder per engine build (VLLM_XLA_CACHE_PATH
  in vLLM)
futile memory flags

== compiler_missing | root | certain
line Failed to find C compiler|Could not find (?:a )?(?:gcc|clang|cl\.exe)
line fatal error: Python\.h: No such file
line (?:nvcc|ninja|g\+\+|gcc): (?:command )?not found|Could not find nvcc
line (?:RuntimeError|OSError): (?:Ninja|CUDA_HOME).{0,60}(?:required|not set)
cause A kernel is compiled at start and the tool for it (C compiler, Python headers, nvcc, ninja) is
  not in the image.
change package build tools: missing -> gcc and python3-dev (nvcc, ninja where named), or an image
  that brings them
change flag --enforce-eager: off -> on, where only torch.compile needs them
futile memory flags

== ptxas_target_unknown | root | certain
line ptxas fatal.{0,40}: Value '(?P<sm>sm_\w+)' is not defined
line Unsupported gpu architecture '?(?P<sm>\w+)|LLVM ERROR: Cannot select
cause The compiler in the image does not know this card's architecture ({sm?too new}).
change package CUDA toolkit and Triton: as they are -> versions that know {sm?the card}
futile an older card's flags

== triton_compile_failed | fault | likely
line (?:triton\S{0,40}CompilationError|triton.compiler.errors)
line (?:BackendCompilerFailed|InductorError|torch\._inductor\.exc)
line Triton Error \[(?:CUDA|HIP)\]
unless shared memory|C compiler
cause A kernel of torch.compile or Triton does not compile for this model and card.
change flag --enforce-eager: off -> on (or --compilation-config level 0), to go without
change package torch and triton: as they are -> the pair that the engine pins
futile memory flags

== flashinfer_jit_failed | root | likely
line flashinfer.{0,160}(?:failed|error|not supported|unsupported)
unless No module named
cause FlashInfer's kernels were not built for this card or cannot be compiled here.
change flag --attention-backend: FLASHINFER -> TRITON_ATTN
futile memory flags

== neuron_compile_failed | root | likely
line \[(?P<code>N[A-Z]+\d+|[A-Z]{2,6}\d{3})\].{0,160}neuronx?-?cc
line neuronx?-cc (?:failed|terminated|returned|exited)|RunNeuronCCImpl: error condition
line Compilation failed for .{0,80}neff|Failed compilation with \['?neuronx-cc
unless F137|forcibly killed
cause The Neuron compiler refuses the graph ({code?see its log}): an operator or shape that it does
  not support.
change act static shapes only; embedding gathers outside the graph; the compiler's log names the
  operator
change package neuronx-cc and torch-neuronx: as they are -> one SDK release's set
futile more memory on the device

== nan_logits | root | likely
line probability tensor contains either `?inf`?, `?nan`?
line \bNaN (?:values? )?(?:found |detected )?in (?:the )?(?:logits|hidden states)
cause Numbers overflowed to inf or nan: float16 is too narrow for Gemma's activations.
change flag --dtype: float16 -> bfloat16 (or float32 on cards without it)
futile another temperature, another prompt

== cuda_async_fault | fault | likely
line CUDA error: (?P<why>an illegal memory access was encountered|device-side assert triggered
  |unspecified launch failure|misaligned address)
line an illegal memory access was encountered|device-side assert triggered
line HIP error: (?P<why>[\w -]+)|Memory (?:access|critical) (?:fault|error) by
line ROCm error: (?P<why>[\w -]+)
cause A kernel failed on the card ({why?see the line}); CUDA reports it later, so the stack trace
  may point elsewhere.
change setting CUDA_LAUNCH_BLOCKING: 0 -> 1, for one run that shows the true place
change flag --enforce-eager: off -> on, to see whether a captured graph is at fault
futile believing the stack trace; restarting alone

== nccl_failed | fault | likely
line NCCL error.{0,60}: (?P<why>[\w ]+)|ncclSystemError|ncclInternalError|ncclUnhandledCudaError
line RCCL error|ncclRemoteError
unless /dev/shm
cause The cards cannot talk to each other (NCCL).
change setting NCCL_DEBUG: unset -> INFO, for one run that says why
change flag --shm-size: 64m -> 8g (or --ipc=host)
futile a smaller model
"""
