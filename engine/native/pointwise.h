// What lies between the matrix products of a Llama layer, row by row.
#pragma once

#include <cmath>

#include "simd.h"

namespace headstart {

// out = x / root mean square of x, times weight.
inline void normalize(const float* x, const float* weight, float* out, int width, float eps) {
  const int whole = width / W * W;
  vf squares{};
  for (int i = 0; i < whole; i += W) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (int i = whole; i < width; i++) total += x[i] * x[i];
  const float factor = 1.f / std::sqrt(total / float(width) + eps);
  for (int i = 0; i < whole; i += W) store(out + i, load(x + i) * factor * load(weight + i));
  for (int i = whole; i < width; i++) out[i] = x[i] * factor * weight[i];
}

// Rotates one head in place by cos and sin, [dim / 2] each.
inline void rotate(float* head, const float* cos, const float* sin, int dim) {
  const int half = dim / 2, whole = half / W * W;
  float* low = head;
  float* high = head + half;
  for (int i = 0; i < whole; i += W) {
    const vf a = load(low + i), b = load(high + i), cosine = load(cos + i), sine = load(sin + i);
    store(low + i, a * cosine - b * sine);
    store(high + i, b * cosine + a * sine);
  }
  for (int i = whole; i < half; i++) {
    const float a = low[i], b = high[i];
    low[i] = a * cos[i] - b * sin[i];
    high[i] = b * cos[i] + a * sin[i];
  }
}

}  // namespace headstart
