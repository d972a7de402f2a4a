// What lets one function be compiled by g++, clang++, nvcc and NVRTC.
#pragma once

#if defined(__CUDACC__)
#define PHUB_HD __host__ __device__ __forceinline__
#else
// Always inlined: each instruction set's loops must hold their own copy. A shared out-of-line copy
// could be the one that was compiled for an instruction set this machine lacks.
#define PHUB_HD inline __attribute__((always_inline))
#endif
