// Vectors of float as wide as the CPU has them, in the vector extensions that GCC and Clang share.
#pragma once

#include <cstdint>
#include <cstring>

namespace headstart {

extern int threads;  // of every kernel

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef float vf_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_unaligned*>(p) = x; }
inline vf splat(float x) { return x - vf{}; }
constexpr int padded(int n) { return (n + W - 1) / W * W; }

// The first halves of a and b, element by element in turn, and their second halves.
inline vf interleave_low(vf a, vf b) {
#if defined(__clang__)
  vf r;
  for (int i = 0; i < W / 2; i++) r[2 * i] = a[i], r[2 * i + 1] = b[i];
  return r;
#else
  vi mask;
  for (int i = 0; i < W / 2; i++) mask[2 * i] = i, mask[2 * i + 1] = W + i;
  return __builtin_shuffle(a, b, mask);
#endif
}
inline vf interleave_high(vf a, vf b) {
#if defined(__clang__)
  vf r;
  for (int i = 0; i < W / 2; i++) r[2 * i] = a[W / 2 + i], r[2 * i + 1] = b[W / 2 + i];
  return r;
#else
  vi mask;
  for (int i = 0; i < W / 2; i++) mask[2 * i] = W / 2 + i, mask[2 * i + 1] = W + W / 2 + i;
  return __builtin_shuffle(a, b, mask);
#endif
}

// Rows to columns, W x W: log2(W) perfect shuffles.
inline void transpose(vf (&rows)[W]) {
#pragma GCC unroll 4
  for (int stage = 1; stage < W; stage *= 2) {
    vf next[W];
    for (int i = 0; i < W / 2; i++) {
      next[2 * i] = interleave_low(rows[i], rows[i + W / 2]);
      next[2 * i + 1] = interleave_high(rows[i], rows[i + W / 2]);
    }
    for (int i = 0; i < W; i++) rows[i] = next[i];
  }
}

// The lowest BITS bits of each element as a number. An element is shifted with its sign.
template <int BITS>
inline vf low_bits(vi x) {
#if defined(__AVX512F__) && !defined(__clang__)
  if (BITS == 4) {  // a shuffle looks at no more bits than these
    const vf numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(numbers, x);
  }
#endif
  return __builtin_convertvector(x & ((1 << BITS) - 1), vf);
}

// Element i of the result is element (i + N) % W.
template <int N>
inline vf rotated(vf x) {
#if defined(__clang__)
  vf r;
  for (int i = 0; i < W; i++) r[i] = x[(i + N) % W];
  return r;
#else
  vi mask;
  for (int i = 0; i < W; i++) mask[i] = (i + N) % W;
  return __builtin_shuffle(x, mask);
#endif
}

inline vf greater(vf a, vf b) { return a > b ? a : b; }

inline float sum(vf x) {
  if (W == 16) x += rotated<8 % W>(x);
  if (W >= 8) x += rotated<4 % W>(x);
  x += rotated<2>(x);
  x += rotated<1>(x);
  return x[0];
}

inline float largest(vf x) {
  if (W == 16) x = greater(x, rotated<8 % W>(x));
  if (W >= 8) x = greater(x, rotated<4 % W>(x));
  x = greater(x, rotated<2>(x));
  x = greater(x, rotated<1>(x));
  return x[0];
}

// e^x to within about two units in the last place; 0 where float would be denormal, infinity from 88.7 on is not
// reached by the callers.
inline vf exponential(vf x) {
  const vf shift = splat(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  vf t = x * 1.44269504f + shift;
  vf n = t - shift;
  vf r = x - n * 0.693145752f - n * 1.42860677e-6f;
  vf p = splat(1.f / 5040);
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  vf value = p * (vf)(((vi)t - 0x4B400000 + 127) << 23);  // casts between vectors keep the bits
  return x < splat(-87.3f) ? vf{} : value;
}

// x times its logistic function, of whose two forms the one is taken that cannot overflow.
inline vf silu(vf x) {
  const vf e = exponential(x < 0.f ? x : -x);
  return x * ((x < 0.f ? e : splat(1.f)) / (e + 1.f));
}

inline float bf16_to_float(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint16_t float_to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace headstart
