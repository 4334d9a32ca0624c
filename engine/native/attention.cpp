// Attention over the paged KV pool: one kernel for decodes, prefill chunks and prefixes that several sequences share.
//
// A task is a set of query rows (token and position) and a range of keys in one block table; it is computed for each
// KV head apart, for all query heads of that group together. The keys pass by in tiles of kTile, in float32 whatever
// the pool holds, with a running maximum and sum per row. A row whose keys are spread over several tasks leaves
// its maximum, sum and weighted values of each in a slot, and they are merged at the end.
#include <cmath>
#include <cstdlib>

#include "kernels.h"
#include "simd.h"

namespace headstart {

int threads = 1;

namespace {

constexpr int kTile = 64;                // keys
constexpr int kRows = 6;                 // query rows in registers
constexpr int kVectors = W == 8 ? 2 : 4;  // so that kRows * kVectors sums fit the registers

const float kNone = -INFINITY;

// One thread's working memory, kept for its next task.
struct Scratch {
  float* memory = nullptr;
  size_t size = 0;
  float* at_least(size_t floats) {
    if (floats > size) {
      free(memory);
      void* fresh = nullptr;
      if (posix_memalign(&fresh, 64, floats * sizeof(float))) abort();
      memory = static_cast<float*>(fresh);
      memset(memory, 0, floats * sizeof(float));
      size = floats;
    }
    return memory;
  }
};
thread_local Scratch scratch;

void store_row(const float* x, void* pool, float* scales, int64_t row, int dim, int kind) {
  if (kind == 0) {
    memcpy(static_cast<float*>(pool) + row * dim, x, dim * sizeof(float));
  } else if (kind == 1) {
    uint16_t* target = static_cast<uint16_t*>(pool) + row * dim;
    for (int i = 0; i < dim; i++) target[i] = float_to_bf16(x[i]);
  } else {
    int8_t* target = static_cast<int8_t*>(pool) + row * dim;
    float most = 0;
    for (int i = 0; i < dim; i++) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
    const float scale = most / 127.f, inverse = most > 0 ? 127.f / most : 0.f;
    scales[row] = scale;
    for (int i = 0; i < dim; i++) target[i] = int8_t(std::nearbyint(x[i] * inverse));
  }
}

// A row of the pool as float32: where it lies if possible, else converted into `space`.
inline const float* load_row(const void* pool, const float* scales, int64_t row, int dim, int kind, float* space) {
  if (kind == 0) {
    const float* source = static_cast<const float*>(pool) + row * dim;
    if (dim % W == 0) return source;
    memcpy(space, source, dim * sizeof(float));
  } else if (kind == 1) {
    const uint16_t* source = static_cast<const uint16_t*>(pool) + row * dim;
    for (int i = 0; i < dim; i++) space[i] = bf16_to_float(source[i]);
  } else {
    const int8_t* source = static_cast<const int8_t*>(pool) + row * dim;
    const float scale = scales[row];
    for (int i = 0; i < dim; i++) space[i] = float(source[i]) * scale;
  }
  return space;
}

// scores[r][i] = query[r] . key i, where keys are [dim, kTile].
template <int R>
void score(const float* query, int query_stride, const float* keys, int dim, float* scores) {
  for (int column = 0; column < kTile; column += kVectors * W) {
    vf acc[R][kVectors] = {};
    for (int d = 0; d < dim; d++) {
      const float* k = keys + d * kTile + column;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const float q = query[r * query_stride + d];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; v++) acc[r][v] += q * load(k + v * W);
      }
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < kVectors; v++) store(scores + r * kTile + column + v * W, acc[r][v]);
  }
}

// acc[r] += sum over keys of weights[r][key] * value of that key, for V vectors of the dimension.
template <int R, int V>
inline void accumulate(const float* weights, const float* const* values, int first, int last, int column, float* acc,
                       int acc_stride) {
  vf sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = load(acc + r * acc_stride + column + v * W);
  for (int i = first; i < last; i++) {
    const float* value = values[i] + column;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const float p = weights[r * kTile + i];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[r][v] += p * load(value + v * W);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(acc + r * acc_stride + column + v * W, sums[r][v]);
}

struct Visible {
  int low, high;  // keys of the tile
};

// Takes one tile of keys into R rows: their weighted values, maxima and sums.
template <int R>
void attend_rows(const headstart_attention& a, const float* query, int query_stride, const float* keys,
                 const float* const* values, const Visible* visible, float* acc, int acc_stride, float* most,
                 float* total) {
  float scores[R * kTile] __attribute__((aligned(64)));
  score<R>(query, query_stride, keys, a.key_dim, scores);
  int first = kTile, last = 0;
  for (int r = 0; r < R; r++) {
    float* s = scores + r * kTile;
    const int low = visible[r].low, high = visible[r].high;
    first = low < first ? low : first;
    last = high > last ? high : last;
    if (a.softcap > 0)
      for (int i = 0; i < kTile; i += W) {  // tanh(x) = 1 - 2 / (e^2x + 1), on the side that cannot overflow
        const vf x = load(s + i) / a.softcap;
        const vf e = exponential((x < 0.f ? x : -x) * 2.f);
        const vf t = (1.f - e) / (1.f + e) * a.softcap;
        store(s + i, x < 0.f ? -t : t);
      }
    for (int i = 0; i < low; i++) s[i] = kNone;
    for (int i = high > low ? high : low; i < kTile; i++) s[i] = kNone;
    vf peak = splat(kNone);
    for (int i = 0; i < kTile; i += W) peak = greater(peak, load(s + i));
    const float before = most[r], now = largest(peak) > before ? largest(peak) : before;
    const float base = now == kNone ? 0.f : now;
    vf added{};
    for (int i = 0; i < kTile; i += W) {
      const vf p = exponential(load(s + i) - base);
      added += p;
      store(s + i, p);
    }
    const float keep = before == kNone ? 0.f : std::exp(before - base);
    total[r] = total[r] * keep + sum(added);
    most[r] = now;
    if (keep != 1.f)
      for (int d = 0; d < acc_stride; d += W) store(acc + r * acc_stride + d, load(acc + r * acc_stride + d) * keep);
  }
  int column = 0;
  for (; column + kVectors * W <= acc_stride; column += kVectors * W)
    accumulate<R, kVectors>(scores, values, first, last, column, acc, acc_stride);
  for (; column < acc_stride; column += W) accumulate<R, 1>(scores, values, first, last, column, acc, acc_stride);
}

void run(const headstart_attention& a, const headstart_task& task, int kv_head) {
  const int group = a.heads / a.kv_heads, rows = task.rows * group;
  const int key_width = padded(a.key_dim), value_width = padded(a.value_dim);
  float* space = scratch.at_least(size_t(rows) * (key_width + value_width + 2 + 2 * W) +
                                  size_t(kTile) * (2 * key_width + value_width) + key_width);
  float* query = space;
  float* acc = query + size_t(rows) * key_width;
  float* keys = acc + size_t(rows) * value_width;  // [key_width, kTile]
  float* key_space = keys + size_t(kTile) * key_width;
  float* value_space = key_space + size_t(kTile) * key_width;
  float* zeros = value_space + size_t(kTile) * value_width;
  float* most = zeros + key_width;
  float* total = most + padded(rows);

  for (int t = 0; t < task.rows; t++) {
    const int64_t token = a.row_token[task.first_row + t];
    for (int g = 0; g < group; g++) {
      const float* source = a.query + token * a.query_token + int64_t(kv_head * group + g) * a.query_head;
      float* target = query + size_t(t * group + g) * key_width;
      for (int d = 0; d < a.key_dim; d++) target[d] = source[d] * a.scaling;
    }
  }
  memset(acc, 0, sizeof(float) * rows * value_width);
  memset(key_space, 0, sizeof(float) * (kTile * (key_width + value_width) + key_width));
  for (int r = 0; r < rows; r++) most[r] = kNone, total[r] = 0;

  const float* key_rows[kTile];
  const float* value_rows[kTile];
  const int32_t* table = a.tables + task.table;
  for (int start = task.first_key; start < task.last_key; start += kTile) {
    const int count = task.last_key - start < kTile ? task.last_key - start : kTile;
    for (int i = 0; i < count; i++) {
      const int position = start + i;
      const int64_t row =
          (int64_t(table[position / a.block]) * a.kv_heads + kv_head) * a.block + position % a.block;
      key_rows[i] = load_row(a.pool_keys, a.key_scales, row, a.key_dim, a.kind, key_space + i * key_width);
      value_rows[i] = load_row(a.pool_values, a.value_scales, row, a.value_dim, a.kind, value_space + i * value_width);
    }
    for (int i = count; i < kTile; i++) key_rows[i] = zeros;
    for (int i = 0; i < kTile; i += W)
      for (int d = 0; d < key_width; d += W) {
        vf corner[W];
        for (int j = 0; j < W; j++) corner[j] = load(key_rows[i + j] + d);
        transpose(corner);
        for (int j = 0; j < W; j++) store(keys + (d + j) * kTile + i, corner[j]);
      }
    for (int r = 0; r < rows; r += kRows) {
      const int some = rows - r < kRows ? rows - r : kRows;
      Visible visible[kRows];
      bool any = false;
      for (int j = 0; j < some; j++) {
        const int position = a.row_position[task.first_row + (r + j) / group];
        int high = position + 1 - start, low = a.window ? position + 1 - a.window - start : 0;
        high = high < 0 ? 0 : high > count ? count : high;
        low = low < 0 ? 0 : low > kTile ? kTile : low;
        visible[j] = {low, high};
        any |= low < high;
      }
      if (!any) continue;
#define HEADSTART_ROWS(R)                                                                                        \
  case R:                                                                                                        \
    attend_rows<R>(a, query + size_t(r) * key_width, key_width, keys, value_rows, visible,                       \
                   acc + size_t(r) * value_width, value_width, most + r, total + r);                             \
    break;
      switch (some) {
        HEADSTART_ROWS(1)
        HEADSTART_ROWS(2)
        HEADSTART_ROWS(3)
        HEADSTART_ROWS(4)
        HEADSTART_ROWS(5)
        HEADSTART_ROWS(6)
      }
#undef HEADSTART_ROWS
    }
  }

  for (int r = 0; r < rows; r++) {
    const int t = r / group, head = kv_head * group + r % group;
    const float* from = acc + size_t(r) * value_width;
    if (task.slot >= 0) {
      float* slot = a.partials + (int64_t(task.slot + t) * a.heads + head) * (value_width + 2);
      memcpy(slot, from, sizeof(float) * value_width);
      slot[value_width] = most[r];
      slot[value_width + 1] = total[r];
      continue;
    }
    float weight = total[r];
    if (a.sinks) weight += std::exp(a.sinks[head] - most[r]);
    float* out = a.out + (int64_t(a.row_token[task.first_row + t]) * a.heads + head) * a.value_dim;
    for (int d = 0; d < a.value_dim; d++) out[d] = from[d] / weight;
  }
}

void merge(const headstart_attention& a, const headstart_merge& m, int head) {
  const int value_width = padded(a.value_dim);
  float* out = a.out + (int64_t(m.token) * a.heads + head) * a.value_dim;
  const auto slot = [&](int i) {
    return a.partials + (int64_t(a.merge_slots[m.first + i]) * a.heads + head) * (value_width + 2);
  };
  float most = a.sinks ? a.sinks[head] : kNone;
  for (int i = 0; i < m.count; i++) most = slot(i)[value_width] > most ? slot(i)[value_width] : most;
  float total = a.sinks ? std::exp(a.sinks[head] - most) : 0.f;
  for (int d = 0; d < a.value_dim; d++) out[d] = 0;
  for (int i = 0; i < m.count; i++) {
    const float* part = slot(i);
    if (part[value_width] == kNone) continue;
    const float factor = std::exp(part[value_width] - most);
    total += part[value_width + 1] * factor;
    for (int d = 0; d < a.value_dim; d++) out[d] += part[d] * factor;
  }
  for (int d = 0; d < a.value_dim; d++) out[d] /= total;
}

}  // namespace
}  // namespace headstart

// Stores the batch's K and V in the pool, then attends.
extern "C" void headstart_attend(const headstart_attention* arguments) {
  using namespace headstart;
  const headstart_attention& a = *arguments;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int token = 0; token < a.tokens; token++)
      for (int head = 0; head < a.kv_heads; head++) {
        const int64_t slot = a.slots[token];
        const int64_t row = (slot / a.block * a.kv_heads + head) * a.block + slot % a.block;
        const float* key = a.key + token * a.key_token + head * a.key_head;
        const float* value = a.value + token * a.value_token + head * a.value_head;
        store_row(key, a.pool_keys, a.key_scales, row, a.key_dim, a.kind);
        store_row(value, a.pool_values, a.value_scales, row, a.value_dim, a.kind);
      }
#pragma omp for schedule(dynamic)
    for (int i = 0; i < a.task_count * a.kv_heads; i++) run(a, a.tasks[i / a.kv_heads], i % a.kv_heads);
    if (a.merge_count) {
#pragma omp for schedule(static)
      for (int i = 0; i < a.merge_count * a.heads; i++) merge(a, a.merges[i / a.heads], i % a.heads);
    }
  }
}

extern "C" void headstart_set_threads(int count) { headstart::threads = count; }

// Bytes of the structures and the width of a vector, so that the caller can check its picture of them.
extern "C" void headstart_layout(int32_t* sizes) {
  sizes[0] = sizeof(headstart_attention);
  sizes[1] = sizeof(headstart_task);
  sizes[2] = sizeof(headstart_merge);
  sizes[3] = sizeof(headstart_layer);
  sizes[4] = sizeof(headstart_kv);
  sizes[5] = sizeof(headstart_batch);
  sizes[6] = headstart::W;
}
