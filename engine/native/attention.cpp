// Attention over the paged KV pool: one kernel for decodes, prefill chunks and prefixes that several sequences share.
//
// A task is a set of query rows (token and position) and a range of keys in one block table; it is computed for each
// KV head apart, for all query heads of that group together. The keys pass by in tiles of kTile, in float32 whatever
// the pool holds. Of kGroup keys all scores are taken, then the weights of each row, then its weighted values: so each
// tile stays in the first-level cache while all rows pass by, and nothing has to be scaled again for a new maximum.
//
// A row's result is the same bits however it is cut into tasks, alone or with others, as a decode or within a prefill:
// the sums begin anew at every kGroup-th position, and the groups are taken together by `fold` in the order of their
// positions. A row whose keys are spread over several tasks leaves each group in a slot, to be folded at the end.
#include "attention.h"

#include <cmath>

#include "scratch.h"
#include "simd.h"

namespace headstart {

int threads = 1;
thread_local Scratch scratch;

namespace {

constexpr int kTile = 64;                 // keys
constexpr int kRows = 6;                  // query rows in registers
constexpr int kVectors = W == 8 ? 2 : 4;  // so that kRows * kVectors sums fit the registers

const float kNone = -INFINITY;

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

// scores[r][i] = query[r] . key i for a tile, where keys are [dim, kTile] and scores [R, kGroup].
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
      for (int v = 0; v < kVectors; v++) store(scores + r * kGroup + column + v * W, acc[r][v]);
  }
}

// Keys of a group, relative to its start, that a row sees.
struct Visible {
  int low, high;
  bool any() const { return low < high; }
};

// The largest score of what a row sees, and nothing beside that within its vectors.
float peak_of(float* scores, Visible seen, float softcap) {
  const int first = seen.low / W * W, last = padded(seen.high);
  if (softcap > 0)
    for (int i = first; i < last; i += W) {  // tanh(x) = 1 - 2 / (e^2x + 1), on the side that cannot overflow
      const vf x = load(scores + i) / softcap;
      const vf e = exponential((x < 0.f ? x : -x) * 2.f);
      const vf t = (1.f - e) / (1.f + e) * softcap;
      store(scores + i, x < 0.f ? -t : t);
    }
  for (int i = first; i < seen.low; i++) scores[i] = kNone;
  for (int i = seen.high; i < last; i++) scores[i] = kNone;
  vf peak = splat(kNone);
  for (int i = first; i < last; i += W) peak = greater(peak, load(scores + i));
  return largest(peak);
}

// Makes the scores of one row weights relative to the largest, zero for what it does not see; their sum.
float weigh(float* scores, Visible seen, float most) {
  const int first = seen.low / W * W, last = padded(seen.high);
  vf added{};
  for (int i = first; i < last; i += W) {
    const vf p = exponential(load(scores + i) - most);
    added += p;
    store(scores + i, p);
  }
  for (int i = 0; i < first; i += W) store(scores + i, vf{});
  for (int i = last; i < kGroup; i += W) store(scores + i, vf{});
  return sum(added);
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
      const float p = weights[r * kGroup + i];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[r][v] += p * load(value + v * W);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(acc + r * acc_stride + column + v * W, sums[r][v]);
}

template <int R>
void accumulate_all(const float* weights, const float* const* values, int first, int last, float* acc, int width) {
  int column = 0;
  for (; column + kVectors * W <= width; column += kVectors * W)
    accumulate<R, kVectors>(weights, values, first, last, column, acc, width);
  for (; column < width; column += W) accumulate<R, 1>(weights, values, first, last, column, acc, width);
}

#define HEADSTART_BY_ROWS(F) {nullptr, F<1>, F<2>, F<3>, F<4>, F<5>, F<6>}
constexpr decltype(&score<1>) kScore[] = HEADSTART_BY_ROWS(score);
constexpr decltype(&accumulate_all<1>) kAccumulate[] = HEADSTART_BY_ROWS(accumulate_all);
#undef HEADSTART_BY_ROWS

// What some rows have gathered over some keys: weighted values [rows, width], the maxima of their scores and the sums of
// their weights, [padded(rows)].
struct Gathered {
  float *values, *most, *total;
};

// Takes `from` into `into`. Not inlined: two copies might be compiled to round differently.
__attribute__((noinline)) void fold(Gathered into, Gathered from, int rows, int width) {
  for (int first = 0; first < rows; first += W) {
    const vf before = load(into.most + first), most = load(from.most + first), now = greater(before, most);
    const vf keep = exponential(before - now), factor = exponential(most - now);
    const vf total = load(into.total + first);
    store(into.most + first, now);
    store(into.total + first, most == kNone ? total : total * keep + load(from.total + first) * factor);
    for (int i = 0; i < W && first + i < rows; i++) {
      if (most[i] == kNone) continue;
      const float kept = keep[i], taken = factor[i];
      float* values = into.values + size_t(first + i) * width;
      const float* others = from.values + size_t(first + i) * width;
      for (int d = 0; d < width; d += W) store(values + d, load(values + d) * kept + load(others + d) * taken);
    }
  }
}

// Writes a row's result: its weighted values over the sum of its weights, to which a sink adds.
__attribute__((noinline)) void finish(const headstart_attention& a, const float* values, float most, float total,
                                      int token, int head) {
  const float weight = a.sinks ? total + std::exp(a.sinks[head] - most) : total;
  float* out = a.out + (int64_t(token) * a.heads + head) * a.value_dim;
  for (int d = 0; d < a.value_dim; d++) out[d] = values[d] / weight;
}

// Where the keys and values of a sequence lie, for one head.
class Rows {
 public:
  Rows(const headstart_attention& a, const int32_t* table, int kv_head)
      : a_(a), table_(table), head_(kv_head) {}

  // The rows of `count` positions from `start` on, as float32: where they lie if possible, else in the spaces.
  void load(int start, int count, const float** keys, const float** values, float* key_space, float* value_space) const {
    const int key_width = padded(a_.key_dim), value_width = padded(a_.value_dim);
    const bool in_place = a_.kind == 0 && key_width == a_.key_dim && value_width == a_.value_dim;
    int block = start / a_.block, offset = start % a_.block;
    for (int i = 0; i < count; block++, offset = 0) {
      const int64_t first = (int64_t(table_[block]) * a_.kv_heads + head_) * a_.block;
      if (in_place) {
        const float* key = static_cast<const float*>(a_.pool_keys) + (first + offset) * key_width;
        const float* value = static_cast<const float*>(a_.pool_values) + (first + offset) * value_width;
        for (; offset < a_.block && i < count; offset++, i++, key += key_width, value += value_width)
          keys[i] = key, values[i] = value;
        continue;
      }
      for (; offset < a_.block && i < count; offset++, i++) {
        keys[i] = load_row(a_.pool_keys, a_.key_scales, first + offset, a_.key_dim, a_.kind, key_space + i * key_width);
        values[i] = load_row(a_.pool_values, a_.value_scales, first + offset, a_.value_dim, a_.kind,
                             value_space + i * value_width);
      }
    }
  }

 private:
  const headstart_attention& a_;
  const int32_t* table_;
  const int head_;
};

// What the rows of a task see of `count` keys from `start` on, and what any of the rows of each block of kRows does.
void see(const headstart_attention& a, const headstart_task& task, int start, int first, int count, Visible* seen,
         Visible* by_block) {
  const int group = a.heads / a.kv_heads;
  for (int t = 0; t < task.rows; t++) {
    const int position = a.row_position[task.first_row + t];
    int high = position + 1 - start, low = a.window ? position + 1 - a.window - start : 0;
    high = high > count ? count : high;
    low = low < first ? first : low;
    const Visible visible = low < high ? Visible{low, high} : Visible{kGroup, 0};
    for (int g = 0; g < group; g++) seen[t * group + g] = visible;
  }
  for (int r = 0; r < task.rows * group; r++) {
    Visible& all = by_block[r / kRows];
    if (r % kRows == 0) all = {kGroup, 0};
    all.low = seen[r].low < all.low ? seen[r].low : all.low;
    all.high = seen[r].high > all.high ? seen[r].high : all.high;
  }
}

inline Visible within(Visible seen, int first, int last) {
  return {seen.low < first ? first : seen.low, seen.high > last ? last : seen.high};
}

// Computes a task for one KV head. What it reads lies in lines of a whole block, which the processor fetches ahead by
// itself: to fetch here as well has gained nothing.
void run(const headstart_attention& a, const headstart_task& task, int kv_head) {
  const int group = a.heads / a.kv_heads, rows = task.rows * group;
  const int key_width = padded(a.key_dim), value_width = padded(a.value_dim), per_row = padded(rows);
  const bool several = task.first_key / kGroup < (task.last_key - 1) / kGroup;
  float* query = scratch.at_least(size_t(rows) * (key_width + 2 * value_width + kGroup) + 8 * size_t(per_row) +
                                  size_t(kTile) * 2 * key_width + size_t(kGroup) * value_width + key_width);
  float* keys = query + size_t(rows) * key_width;  // [key_width, kTile]
  float* key_space = keys + size_t(kTile) * key_width;
  float* value_space = key_space + size_t(kTile) * key_width;
  float* zeros = value_space + size_t(kGroup) * value_width;
  float* most = zeros + key_width;
  float* total = most + per_row;
  float* all_most = total + per_row;
  float* all_total = all_most + per_row;
  Visible* seen = reinterpret_cast<Visible*>(all_total + per_row);
  Visible* by_block = seen + per_row;       // of kRows rows
  float* scores = all_total + 5 * per_row;  // [rows, kGroup]
  float* acc = scores + size_t(rows) * kGroup;
  float* all_acc = acc + size_t(rows) * value_width;

  for (int t = 0; t < task.rows; t++) {
    const int64_t token = a.row_token[task.first_row + t];
    for (int g = 0; g < group; g++) {
      const float* source = a.query + token * a.query_token + int64_t(kv_head * group + g) * a.query_head;
      float* target = query + size_t(t * group + g) * key_width;
      for (int d = 0; d < a.key_dim; d++) target[d] = source[d] * a.scaling;
    }
  }
  for (int i = 0; i < key_width; i++) zeros[i] = 0;
  if (several) {
    for (int r = 0; r < rows; r++) all_most[r] = kNone, all_total[r] = 0;
    memset(all_acc, 0, sizeof(float) * rows * value_width);
  }

  const Rows source(a, a.tables + task.table, kv_head);
  const float* key_rows[kTile];
  const float* value_rows[kGroup];
  for (int start = task.first_key / kGroup * kGroup; start < task.last_key; start += kGroup) {
    const int count = task.last_key - start < kGroup ? task.last_key - start : kGroup;
    const int skipped = start < task.first_key ? task.first_key - start : 0;  // nobody sees them
    see(a, task, start, skipped, count, seen, by_block);
    for (int tile = skipped / kTile * kTile; tile < count; tile += kTile) {
      const int first = tile < skipped ? skipped : tile, last = tile + kTile < count ? tile + kTile : count;
      source.load(start + first, last - first, key_rows + first - tile, value_rows + first, key_space,
                  value_space + size_t(tile) * value_width);
      for (int i = tile; i < first; i++) key_rows[i - tile] = zeros;
      for (int i = last; i < tile + kTile; i++) key_rows[i - tile] = zeros;
      for (int i = 0; i < kTile; i += W)
        for (int d = 0; d < key_width; d += W) {
          vf corner[W];
          for (int j = 0; j < W; j++) corner[j] = load(key_rows[i + j] + d);
          transpose(corner);
          for (int j = 0; j < W; j++) store(keys + (d + j) * kTile + i, corner[j]);
        }
      for (int r = 0; r < rows; r += kRows) {
        const int some = rows - r < kRows ? rows - r : kRows;
        if (within(by_block[r / kRows], first, last).any())
          kScore[some](query + size_t(r) * key_width, key_width, keys, a.key_dim, scores + size_t(r) * kGroup + tile);
      }
    }
    // All maxima come first: the processor then works on the weights of a row while it waits for those of another.
    for (int r = 0; r < rows; r++)
      most[r] = seen[r].any() ? peak_of(scores + size_t(r) * kGroup, seen[r], a.softcap) : kNone;
    for (int r = 0; r < rows; r++) {
      total[r] = 0;
      if (seen[r].any())
        total[r] = weigh(scores + size_t(r) * kGroup, seen[r], most[r]);
      else
        memset(scores + size_t(r) * kGroup, 0, sizeof(float) * kGroup);
    }
    memset(acc, 0, sizeof(float) * rows * value_width);
    for (int r = 0; r < rows; r += kRows) {
      const int some = rows - r < kRows ? rows - r : kRows;
      const Visible any = by_block[r / kRows];
      if (any.any())
        kAccumulate[some](scores + size_t(r) * kGroup, value_rows, any.low, any.high, acc + size_t(r) * value_width,
                          value_width);
    }
    if (several) fold({all_acc, all_most, all_total}, {acc, most, total}, rows, value_width);
  }
  if (several) acc = all_acc, most = all_most, total = all_total;

  for (int r = 0; r < rows; r++) {
    const int t = r / group, head = kv_head * group + r % group;
    float* values = acc + size_t(r) * value_width;
    if (task.slot < 0) {
      finish(a, values, most[r], total[r], a.row_token[task.first_row + t], head);
    } else {
      float* slot = a.partials + (int64_t(task.slot + t) * a.heads + head) * (value_width + 2);
      memcpy(slot, values, sizeof(float) * value_width);
      slot[value_width] = most[r];
      slot[value_width + 1] = total[r];
    }
  }
}

void merge(const headstart_attention& a, const headstart_merge& m, int head) {
  const int value_width = padded(a.value_dim);
  float* values = scratch.at_least(value_width + 4 * W);
  float *most = values + value_width, *total = most + W, *part_most = total + W, *part_total = part_most + W;
  memset(values, 0, sizeof(float) * value_width);
  *most = kNone, *total = 0;
  for (int i = 0; i < m.count; i++) {
    float* slot = a.partials + (int64_t(a.merge_slots[m.first + i]) * a.heads + head) * (value_width + 2);
    *part_most = slot[value_width], *part_total = slot[value_width + 1];
    fold({values, most, total}, {slot, part_most, part_total}, 1, value_width);
  }
  finish(a, values, *most, *total, m.token, head);
}

}  // namespace

void store_kv(const headstart_attention& a) {
#pragma omp for schedule(static) nowait
  for (int token = 0; token < a.tokens; token++)
    for (int head = 0; head < a.kv_heads; head++) {
      const int64_t slot = a.slots[token];
      const int64_t row = (slot / a.block * a.kv_heads + head) * a.block + slot % a.block;
      const float* key = a.key + token * a.key_token + head * a.key_head;
      const float* value = a.value + token * a.value_token + head * a.value_head;
      store_row(key, a.pool_keys, a.key_scales, row, a.key_dim, a.kind);
      store_row(value, a.pool_values, a.value_scales, row, a.value_dim, a.kind);
    }
}

void attend(const headstart_attention& a) {
#pragma omp for schedule(dynamic) nowait
  for (int i = 0; i < a.task_count * a.kv_heads; i++) run(a, a.tasks[i / a.kv_heads], i % a.kv_heads);
  if (a.merge_count) {
#pragma omp barrier
#pragma omp for schedule(static) nowait
    for (int i = 0; i < a.merge_count * a.heads; i++) merge(a, a.merges[i / a.heads], i % a.heads);
  }
}

}  // namespace headstart

// Stores the batch's K and V in the pool, then attends.
extern "C" void headstart_attend(const headstart_attention* arguments) {
  using namespace headstart;
#pragma omp parallel num_threads(threads)
  {
    store_kv(*arguments);
#pragma omp barrier
    attend(*arguments);
  }
}
