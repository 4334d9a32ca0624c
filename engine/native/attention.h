// Attention over the paged KV pool.
#pragma once

#include "kernels.h"

namespace headstart {

// Keys whose weighted values are summed by themselves. The keys of a row are cut into tasks at its multiples only.
constexpr int kGroup = 128;

// Both are called by all threads of a parallel region and share the work among them. They end without a barrier.

// Stores the batch's K and V in the pool. A thread stores the tokens that a static schedule gives it.
void store_kv(const headstart_attention& a);

// Attends to what is in the pool, which all threads must have stored.
void attend(const headstart_attention& a);

}  // namespace headstart
