// What lies between the matrix products of a Llama layer, each in one pass over the batch.
#include <cmath>

#include "simd.h"

namespace headstart {
namespace {

constexpr int kAlone = 8192;  // elements that one thread is through with before another would have started

void normalize(const float* x, const float* weight, float* out, int width, float eps) {
  const int whole = width / W * W;
  vf squares{};
  for (int i = 0; i < whole; i += W) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (int i = whole; i < width; i++) total += x[i] * x[i];
  const float factor = 1.f / std::sqrt(total / float(width) + eps);
  for (int i = 0; i < whole; i += W) store(out + i, load(x + i) * factor * load(weight + i));
  for (int i = whole; i < width; i++) out[i] = x[i] * factor * weight[i];
}

}  // namespace
}  // namespace headstart

// out = x / root mean square of x, times weight; [rows, width] each, contiguous.
extern "C" void headstart_rms_norm(const float* x, const float* weight, float* out, int rows, int width, float eps) {
  using namespace headstart;
#pragma omp parallel for schedule(static) num_threads(threads) if (int64_t(rows) * width > kAlone)
  for (int row = 0; row < rows; row++)
    normalize(x + int64_t(row) * width, weight, out + int64_t(row) * width, width, eps);
}

// Rotates the first `heads` heads of each row of qkv in place; cos and sin are [rows, dim / 2]. Heads are normalized
// before that where there are weights for it: the first `query_heads` by query_norm, the others by key_norm.
extern "C" void headstart_rotate(float* qkv, int64_t stride, const float* cos, const float* sin, const float* query_norm,
                                 const float* key_norm, int rows, int query_heads, int heads, int dim, float eps) {
  using namespace headstart;
  const int half = dim / 2, whole = half / W * W;
#pragma omp parallel for schedule(static) num_threads(threads) if (int64_t(rows) * heads * dim > kAlone)
  for (int row = 0; row < rows; row++) {
    const float* c = cos + int64_t(row) * half;
    const float* s = sin + int64_t(row) * half;
    for (int head = 0; head < heads; head++) {
      float* low = qkv + row * stride + int64_t(head) * dim;
      float* high = low + half;
      const float* weight = head < query_heads ? query_norm : key_norm;
      if (weight) normalize(low, weight, low, dim, eps);
      for (int i = 0; i < whole; i += W) {
        const vf a = load(low + i), b = load(high + i), cosine = load(c + i), sine = load(s + i);
        store(low + i, a * cosine - b * sine);
        store(high + i, b * cosine + a * sine);
      }
      for (int i = whole; i < half; i++) {
        const float a = low[i], b = high[i];
        low[i] = a * c[i] - b * s[i];
        high[i] = b * c[i] + a * s[i];
      }
    }
  }
}

// out = silu(gate) * up, where a row of gate_up is [gate, up] and `width` long each.
extern "C" void headstart_silu_product(const float* gate_up, float* out, int rows, int width) {
  using namespace headstart;
  const int whole = width / W * W;
#pragma omp parallel for schedule(static) num_threads(threads) if (int64_t(rows) * width > kAlone)
  for (int row = 0; row < rows; row++) {
    const float* gate = gate_up + int64_t(row) * 2 * width;
    const float* up = gate + width;
    float* target = out + int64_t(row) * width;
    for (int i = 0; i < whole; i += W) {
      const vf g = load(gate + i);
      // Of the two forms of the logistic function, the one that cannot overflow.
      const vf e = exponential(g < 0.f ? g : -g);
      const vf logistic = (g < 0.f ? e : splat(1.f)) / (e + 1.f);
      store(target + i, g * logistic * load(up + i));
    }
    for (int i = whole; i < width; i++) target[i] = gate[i] / (1.f + std::exp(-gate[i])) * up[i];
  }
}
