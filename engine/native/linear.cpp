// Products of few rows with a weight matrix: each weight is read from memory once, in the order in which it lies.
//
// General matrix libraries copy the weights into another order first, which costs more than the product itself when
// there are only a few rows to multiply.
#include "simd.h"

namespace headstart {
namespace {

constexpr int kLine = 16;  // floats

struct Product {
  const float* x;  // [m, k], rows x_stride apart
  int64_t x_stride;
  const float* weight;  // [n, k], contiguous
  const float* bias;    // [n] or null
  float* out;           // [m, n], rows out_stride apart
  int64_t out_stride;
  int m, n, k;
  bool add;  // to what out holds
};

inline void finish(const Product& p, int m, int n, float value) {
  if (p.bias) value += p.bias[n];
  float* target = p.out + m * p.out_stride + n;
  *target = p.add ? *target + value : value;
}

// MT rows of x from row m0 on times W / MT rows of the weight: W sums in flight. The first `skip` rows are not stored.
// Meanwhile the next rows of the weight are fetched, FETCH cache lines per step, from `fetch` on.
template <int MT, int FETCH>
inline void tile(const Product& p, int m0, int skip, int n0, const float* fetch) {
  constexpr int NT = W / MT;
  const int whole = p.k / W * W;
  const float* x = p.x + m0 * p.x_stride;
  const float* rows = p.weight + int64_t(n0) * p.k;
  vf acc[W] = {};
  for (int i = 0; i < whole; i += W) {
    for (int line = 0; line < FETCH; line++) __builtin_prefetch(fetch + line * kLine);
    fetch += FETCH * kLine;
    vf xs[MT];
#pragma GCC unroll 16
    for (int m = 0; m < MT; m++) xs[m] = load(x + m * p.x_stride + i);
#pragma GCC unroll 16
    for (int j = 0; j < NT; j++) {
      vf w = load(rows + int64_t(j) * p.k + i);
#pragma GCC unroll 16
      for (int m = 0; m < MT; m++) acc[m * NT + j] += xs[m] * w;
    }
  }
  float total[W];
  store(total, sums(acc));
  for (int m = skip; m < MT; m++)
    for (int j = 0; j < NT; j++) {
      float value = total[m * NT + j];
      for (int i = whole; i < p.k; i++) value += x[m * p.x_stride + i] * rows[int64_t(j) * p.k + i];
      finish(p, m0 + m, n0 + j, value);
    }
}

float dot(const float* a, const float* b, int k) {
  vf acc{};
  const int whole = k / W * W;
  for (int i = 0; i < whole; i += W) acc += load(a + i) * load(b + i);
  float value = sum(acc);
  for (int i = whole; i < k; i++) value += a[i] * b[i];
  return value;
}

template <int MT, int FETCH>
void multiply(const Product& p) {
  constexpr int NT = W / MT;
  const int groups = p.n / NT;
  const int64_t stride = int64_t(NT) * p.k, share = int64_t(FETCH) * kLine * (p.k / W);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int group = 0; group < groups; group++) {
    const float* next = p.weight + (group + 1) * stride;
    for (int m = 0; m < p.m; m += MT) {
      // The last rows are taken together with some that are done already.
      const int first = m + MT <= p.m ? m : p.m - MT;
      const int64_t done = m / MT * share;
      if (done < stride)
        tile<MT, FETCH>(p, first, m - first, group * NT, next + done);
      else
        tile<MT, 0>(p, first, m - first, group * NT, next);
    }
  }
  for (int n = groups * NT; n < p.n; n++)
    for (int m = 0; m < p.m; m++) finish(p, m, n, dot(p.x + m * p.x_stride, p.weight + int64_t(n) * p.k, p.k));
}

}  // namespace
}  // namespace headstart

// out[m, n] (+)= sum over k of x[m, k] * weight[n, k] (+ bias[n]).
extern "C" void headstart_linear(const float* x, int64_t x_stride, const float* weight, const float* bias, float* out,
                                 int64_t out_stride, int m, int n, int k, int add) {
  using namespace headstart;
  const Product product{x, x_stride, weight, bias, out, out_stride, m, n, k, add != 0};
  if (m > 12)
    multiply<4, W / 16>(product);
  else if (m > 4)
    multiply<4, W / 8>(product);
  else if (m == 4)
    multiply<4, W / 4>(product);
  else if (m >= 2)
    multiply<2, 0>(product);
  else if (m == 1)
    multiply<1, 0>(product);
}
