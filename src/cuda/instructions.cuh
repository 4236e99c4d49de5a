// Instructions that C++ has no words for, each behind a function: tensor-core products
// of 16 x 8 x 16, matrix loads from shared memory, asynchronous copies into it, and barriers.
// Everything here exists on sm_80 and later. This file and sm90/instructions.cuh hold all assembly,
// and tests/emulated_device has others of the same names, with which kernels run on the host.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// Names the shared memory that a launch asks for, an array of bytes. A function that returned a
// pointer to it would cost registers.
#define LLN_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

namespace lln::cuda {

using Bf16 = __nv_bfloat16;
using F16 = __half;

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The smaller and the larger one, NaN where one of them is; min and max drop that.
__device__ inline float min_keep_nan(float x, float y) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  return x;
}
__device__ inline float max_keep_nan(float x, float y) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  return x;
}

// Two 16-bit numbers in a word, the first in its lower half.
template <class T>
__device__ std::uint32_t pack(float x, float y);
template <>
__device__ inline std::uint32_t pack<Bf16>(float x, float y) {
  std::uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(y), "f"(x));
  return word;
}
template <>
__device__ inline std::uint32_t pack<F16>(float x, float y) {
  std::uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(y), "f"(x));
  return word;
}

// max(x, |y|) of two bf16 numbers each; NaN where one of them is.
__device__ inline std::uint32_t larger_magnitudes(std::uint32_t x, std::uint32_t y) {
  asm("{.reg .b32 z; abs.bf16x2 z, %1; max.NaN.bf16x2 %0, %0, z;}" : "+r"(x) : "r"(y));
  return x;
}

// d += a b: a is 16 x 16 (rows lane / 4 and + 8), b 16 x 8, d 16 x 8.
template <class T>
__device__ inline void mma(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                           std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  if constexpr (std::is_same_v<T, Bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes of shared memory, read here and now: what does not change in a loop would otherwise be
// kept in registers that there are not enough of.
__device__ inline uint4 load_shared(const void* p) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared_address(p)));
  return x;
}

// Four 8 x 8 matrices: lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(std::uint32_t (&x)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// The same, each transposed: lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_transposed(std::uint32_t (&x)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// 16 bytes from global to shared memory; zeros where not `valid`, and nothing is read then.
__device__ inline void copy_async(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
// One 4-byte word.
__device__ inline void copy_word_async(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Launches of one call follow each other on the device without waiting for the host to see the end
// of the one before (launch.h): a kernel's blocks may start while the last ones of the previous
// kernel are under way, and must wait before they read what it wrote.
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for `threads` threads of the block, whole warps that name the same barrier; 0 is that of
// __syncthreads().
__device__ inline void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Set by any number of threads, which all write the same.
__device__ inline void raise_flag(std::uint32_t& flag) { flag = 1; }

// Bytes of device memory on their way to the L2 cache, a multiple of 16.
__device__ inline void prefetch_l2(const void* from, unsigned bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
               "r"(bytes)
               : "memory");
#endif
}

}  // namespace lln::cuda
