// What the kernels take. Python mirrors these structures in library.py.
#pragma once

#include <cstdint>

extern "C" {
struct headstart_task {
  int32_t first_row, rows;      // in `row_token` and `row_position`
  int32_t first_key, last_key;  // positions, the last one excluded
  int32_t table;                // where its block table starts in `tables`
  int32_t slot;                 // of the first row, the others follow; -1: rows are complete, write them out
};
struct headstart_merge {
  int32_t token, first, count;  // in `merge_slots`
};
struct headstart_attention {
  const float *query, *key, *value;
  float* out;  // [tokens, heads, value_dim]
  void *pool_keys, *pool_values;
  float *key_scales, *value_scales;  // [blocks, kv_heads, block], for int8
  const float* sinks;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides in elements
  const int64_t* slots;                                                           // of the batch's tokens
  const headstart_task* tasks;
  const int32_t *row_token, *row_position, *tables;
  const headstart_merge* merges;
  const int32_t* merge_slots;
  float* partials;  // [slots, heads, padded value_dim + 2]
  int32_t tokens, task_count, merge_count;
  int32_t heads, kv_heads, key_dim, value_dim, block;
  int32_t kind;    // of the pool: 0 float32, 1 bfloat16, 2 int8
  int32_t window;  // 0: none
  float scaling, softcap;
};

// A weight [n, k] in panels of consecutive rows, see PackedMatrix. A panel is made of rows of 32-bit words, one word for
// each of its rows of the weight. By kind:
// 0: float32, [k, panel];
// 1: pairs of bfloat16 that follow each other in k, the first one in the low half, [ceil(k / 2), panel];
// 2: for every 32 of k, float32 scales and offsets, [2, panel], and behind them numbers of 4 bits, [4, panel], eight in
//    a word with the first one lowest: a weight is its number times scale plus offset;
// 3: the same with numbers of 8 bits, [8, panel].
struct headstart_matrix {
  const void* panels;
  const void* rest;   // the last n % (rows of a panel) rows as a panel padded with zeros; null where there are none
  const float* bias;  // [n] or null
  int32_t n, k;
  int32_t kind;
};
// Weights of a layer, see LeanLayer. Head norms may be null.
struct headstart_layer {
  const float *input_norm, *query_norm, *key_norm, *mlp_norm;
  headstart_matrix qkv, output, gate, up, down;
  float scaling;
  int32_t kind;  // which of the batch's attentions (they differ in their windows)
};
struct headstart_kv {
  void *keys, *values;
  float *key_scales, *value_scales;
};
struct headstart_batch {
  const headstart_layer* layers;
  const headstart_matrix* head;
  const headstart_matrix* embedding;      // null: `table` is the embedding
  const void* table;                      // [vocabulary, width]
  const float* norm;                      // before the head
  const headstart_kv* pool;               // by layer
  const headstart_attention* attentions;  // by kind; what differs between layers is filled in
  const int64_t *token_ids, *positions;   // [tokens]
  const int64_t* rows;                    // of the tokens whose logits are wanted
  const float *cos, *sin;                 // by position, [dim / 2]
  float *hidden, *normed, *qkv, *attended, *product;  // of all tokens
  float *last_hidden, *last_attended;                 // of the rows
  float* logits;                                      // [rows, vocabulary]
  int32_t layer_count, tokens, row_count, width, heads, kv_heads, dim;
  float eps;
};

void headstart_attend(const headstart_attention*);
void headstart_forward(const headstart_batch*);
void headstart_multiply(const float* x, int m, const headstart_matrix*, float* out);
void headstart_set_threads(int);
void headstart_layout(int32_t* sizes);
}
