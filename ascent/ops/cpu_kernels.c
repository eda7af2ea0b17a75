/* Kernels of a language model on a CPU, in float32. Decoding: matmuls with few rows, RMSNorm, attention and sampling.
   Updates: the elementwise operators and norms between matmuls, which BLAS computes. cpu_kernels.py compiles this file.

   Every sum is computed in one order, whatever the number of rows and threads: a row has the same bits alone and in a
   batch. The weight W of x.W' is packed into panels of PANEL of its rows, each `[k PANEL]`, and the last one is padded
   with zeros. So a panel is read sequentially, and the next part is prefetched while it is multiplied.

   Vectors are GCC vector extensions of the processor's width. Matrices are contiguous `[row column]`. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) /* 32 registers of 16 floats: 24 accumulators, 3 for a panel, 1 for x */
#define LANES 16
#define TILE 8
#define VECTORS 3
#elif defined(__AVX2__) /* 16 registers of 8 floats */
#define LANES 8
#define TILE 6
#define VECTORS 2
#else /* 32 registers of 4 floats (Arm) */
#define LANES 4
#define TILE 8
#define VECTORS 3
#endif
#define PANEL (LANES * VECTORS)
#define ROWS 64   /* rows of x per panel multiplication */
#define DEPTH 512 /* depth of a panel multiplication, so that its part of a panel fills at most 10 % of the L2 cache */
#define QUERIES 4 /* queries that are computed at once */
#define PARTS 4   /* vectors of a value that are accumulated at once */
#define ROOM 1024 /* scores in the buffer of a query */
#define LINE 16   /* floats in a cache line */
#define FEW 8192  /* floats below which a second thread does not pay */
#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* unaligned */
typedef int32_t integers __attribute__((vector_size(4 * LANES)));

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE vector at(const float *x) { return *(const loose *)x; }
INLINE void put(float *x, vector v) { *(loose *)x = v; }
INLINE vector all(float x) { return x - (vector){0}; }
INLINE vector pick(integers which, vector a, vector b) {
  return (vector)(((integers)a & which) | ((integers)b & ~which));
}
INLINE vector larger(vector a, vector b) { return pick(b > a, b, a); } /* a where b is NaN */

/* Shuffle masks for one or two vectors: f maps lane j to its source. Lanes of the second vector start at LANES. */
#if LANES == 16
#define ORDER(f) (integers){f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), \
                            f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)}
#elif LANES == 8
#define ORDER(f) (integers){f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)}
#else
#define ORDER(f) (integers){f(0), f(1), f(2), f(3)}
#endif
#define BY_8(j) (j ^ 8)
#define BY_4(j) (j ^ 4)
#define BY_2(j) (j ^ 2)
#define BY_1(j) (j ^ 1)
#define EVEN(j) (j & 1 ? LANES + j - 1 : j)
#define ODD(j) (j & 1 ? LANES + j : j + 1)
#define LOW(j) (j & 2 ? LANES + j - 2 : j)
#define HIGH(j) (j & 2 ? LANES + j : j + 2)

/* Horizontal sum and maximum, by folding halves. The maximum ignores NaN. */
INLINE vector down_to_4(vector v) {
#if LANES == 16
  v += __builtin_shuffle(v, ORDER(BY_8));
#endif
#if LANES >= 8
  v += __builtin_shuffle(v, ORDER(BY_4));
#endif
  return v;
}
INLINE float total(vector v) {
  v = down_to_4(v);
  v += __builtin_shuffle(v, ORDER(BY_2));
  return (v + __builtin_shuffle(v, ORDER(BY_1)))[0];
}
INLINE float largest(vector v) {
#if LANES == 16
  v = larger(v, __builtin_shuffle(v, ORDER(BY_8)));
#endif
#if LANES >= 8
  v = larger(v, __builtin_shuffle(v, ORDER(BY_4)));
#endif
  v = larger(v, __builtin_shuffle(v, ORDER(BY_2)));
  return larger(v, __builtin_shuffle(v, ORDER(BY_1)))[0];
}
INLINE void put_totals(float *x, vector a, vector b, vector c, vector d) { /* horizontal sums of four vectors */
  a = __builtin_shuffle(a, b, ORDER(EVEN)) + __builtin_shuffle(a, b, ORDER(ODD));
  c = __builtin_shuffle(c, d, ORDER(EVEN)) + __builtin_shuffle(c, d, ORDER(ODD));
  a = down_to_4(__builtin_shuffle(a, c, ORDER(LOW)) + __builtin_shuffle(a, c, ORDER(HIGH)));
  for (int i = 0; i < 4; i++) x[i] = a[i];
}

/* e^x for x <= 0 to about 1 ulp; 0 below -87, NaN for NaN. x = n.log 2 + r, with a Taylor series for e^r. */
INLINE vector exponential(vector given) {
  const vector magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
  vector x = larger(given, all(-87.0f));
  vector shifted = x * 1.44269504f + magic, n = shifted - magic;
  vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vector series = all(1 / 5040.0f);
  series = series * r + 1 / 720.0f;
  series = series * r + 1 / 120.0f;
  series = series * r + 1 / 24.0f;
  series = series * r + 1 / 6.0f;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  vector power = (vector)((integers)series + (((integers)shifted - (integers)magic) << 23));
  return pick(given != given, given, pick(given < -87.0f, all(0), power));
}

INLINE vector logistic(vector z) { /* e^z / (1 + e^z) or 1 / (1 + e^-z), so that no exponent is positive */
  vector e = exponential(pick(z < 0, z, -z));
  return pick(z < 0, e, all(1)) / (1 + e);
}

/* SiLU g.s(g), or tanh-approximated GELU g.s(2u) with u = 0.798 (g + 0.0447 g^3); s is the logistic function. */
INLINE vector activated(vector g, int gelu) {
  return g * logistic(gelu ? 1.5957691216f * (g + 0.044715f * g * g * g) : g);
}

/* ---- matmul ------------------------------------------------------------------------------------------ */

long panel_width(void) { return PANEL; }

/* Pack `rows` rows of a weight, at row `first` of the merged weight, into every `step`th panel starting at `skip`. */
void pack_weight(const float *w, long rows, long k, long first, long step, long skip, float *packed, int threads) {
  long low = first / PANEL, high = (first + rows - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long p = low; p <= high; p++) {
    float *into = packed + (p * step + skip) * k * PANEL;
    for (long i = 0; i < PANEL; i++) {
      long row = p * PANEL + i - first;
      if (row < 0 || row >= rows) continue;
      for (long t = 0; t < k; t++) into[t * PANEL + i] = w[row * k + t];
    }
  }
}

INLINE void accumulate(const int rows, const float *x, long stride, const float *w, vector sum[TILE][VECTORS]) {
  vector part[VECTORS];
  for (int j = 0; j < VECTORS; j++) part[j] = at(w + j * LANES);
#pragma GCC unroll 8
  for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
    for (int j = 0; j < VECTORS; j++) sum[i][j] += x[i * stride] * part[j];
}

/* sums (+)= x.w' for `rows` rows and depth `k` with one panel; prefetches `lines` cache lines per 8 of k. */
INLINE void tile(const int rows, long k, const float *x, long stride, const float *w, float *sums, int more,
                 const float *next, long lines) {
  vector sum[TILE][VECTORS];
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < VECTORS; j++) sum[i][j] = more ? at(sums + i * PANEL + j * LANES) : all(0);
  long t = 0;
  for (; t + 8 <= k; t += 8) {
    for (long line = 0; line < lines; line++, next += LINE) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 8
    for (int u = 0; u < 8; u++) accumulate(rows, x + t + u, stride, w + (t + u) * PANEL, sum);
  }
  for (; t < k; t++) accumulate(rows, x + t, stride, w + t * PANEL, sum);
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < VECTORS; j++) put(sums + i * PANEL + j * LANES, sum[i][j]);
}

/* sums = x.w' for at most ROWS rows with one panel. */
static void multiply(long rows, long k, const float *x, const float *w, float *sums) {
  long tiles = (rows + TILE - 1) / TILE, lines = (8 * PANEL / LINE + tiles - 1) / tiles;
  for (long t = 0; t < k; t += DEPTH) {
    long depth = smaller(k - t, DEPTH);
    const float *next = w + (t + depth) * PANEL;
    for (long i = 0; i < rows; i += TILE, next += (depth + 7) / 8 * lines * LINE) {
      const float *from = x + i * k + t, *part = w + t * PANEL;
      float *into = sums + i * PANEL;
      switch (smaller(rows - i, TILE)) {
#define CASE(n) \
  case n: tile(n, depth, from, k, part, into, t > 0, next, lines); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if TILE == 8
        CASE(7) CASE(8)
#endif
      }
    }
  }
}

/* y = x.W' + bias, or if gated act(x.W_gate' + bias).(x.W_up' + bias) with interleaved panels. `n`: columns of y. */
void matmul(const float *x, long rows, long k, const float *packed, long n, const float *bias, int gated, int gelu,
             float *y, int threads) {
  long panels = (n + PANEL - 1) / PANEL, some = ROWS;
  while (some > TILE && (rows + some - 1) / some * panels < 2 * threads) some /= 2;
  long units = (rows + some - 1) / some * panels;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long unit = 0; unit < units; unit++) {
    float sums[2][ROWS * PANEL];
    long first = unit / panels * some, p = unit % panels, columns = smaller(n - p * PANEL, PANEL);
    long count = smaller(rows - first, some);
    for (int part = 0; part <= gated; part++)
      multiply(count, k, x + first * k, packed + (p * (gated + 1) + part) * k * PANEL, sums[part]);
    for (long i = 0; i < count; i++) {
      float *sum = sums[0] + i * PANEL, *up = sums[1] + i * PANEL;
      for (long j = 0; bias && j < columns; j++) {
        sum[j] += bias[p * PANEL + j];
        if (gated) up[j] += bias[n + p * PANEL + j];
      }
      for (int j = 0; gated && j < PANEL; j += LANES) put(sum + j, activated(at(sum + j), gelu) * at(up + j));
      memcpy(y + (first + i) * n + p * PANEL, sum, columns * sizeof(float));
    }
  }
}

/* ---- RMSNorm ----------------------------------------------------------------------------------------- */

/* x <- x + y if y is not NULL; out = (offset + weight).x / sqrt(mean x^2 + eps). */
void add_rms_norm(float *x, const float *y, const float *weight, float eps, float offset, long rows, long width,
                  float *out, int threads) {
  long even = width / LANES * LANES;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > FEW)
  for (long i = 0; i < rows; i++) {
    float *row = x + i * width, *into = out + i * width, squares = 0;
    const float *other = y + i * width;
    vector sum = all(0);
    for (long j = 0; y && j < width; j++) row[j] += other[j];
    for (long j = 0; j < even; j += LANES) sum += at(row + j) * at(row + j);
    for (long j = even; j < width; j++) squares += row[j] * row[j];
    float scale = 1 / sqrtf((total(sum) + squares) / width + eps);
    for (long j = 0; j < width; j++) into[j] = row[j] * scale * (offset + weight[j]);
  }
}

/* ---- attention --------------------------------------------------------------------------------------- */

/* KV cache of one head of a sequence: `prompt_blocks` blocks with `prompt_keys` keys, then blocks with `response_keys`
   keys. A block has keys and values `[head block_size head_dim]`, `stride` floats each; the head is at `offset`. */
struct row {
  const int64_t *blocks;
  long prompt_blocks, prompt_keys, response_keys, block_size, head_dim, offset, stride;
};

INLINE long place(const struct row *row, long block) { return row->blocks[block] * row->stride + row->offset; }

INLINE long tokens(const struct row *row, long block) {
  int in_prompt = block < row->prompt_blocks;
  long first = (in_prompt ? block : block - row->prompt_blocks) * row->block_size;
  return smaller((in_prompt ? row->prompt_keys : row->response_keys) - first, row->block_size);
}

/* Scores q.k of the keys of a block for one query. */
INLINE void score(const float *k, long n, long head_dim, const float *q, float *scores) {
  long t = 0;
  for (; t + 4 <= n; t += 4, k += 4 * head_dim) {
    vector a = all(0), b = a, c = a, d = a;
    for (long j = 0; j < head_dim; j += LANES) {
      a += at(q + j) * at(k + j), b += at(q + j) * at(k + head_dim + j);
      c += at(q + j) * at(k + 2 * head_dim + j), d += at(q + j) * at(k + 3 * head_dim + j);
    }
    put_totals(scores + t, a, b, c, d);
  }
  for (; t < n; t++, k += head_dim) {
    vector a = all(0);
    for (long j = 0; j < head_dim; j += LANES) a += at(q + j) * at(k + j);
    scores[t] = total(a);
  }
}

/* sum += p.v of a block, `parts` vectors of each value at once. */
INLINE void add(const int queries, const int parts, const float *v, long n, long head_dim, const float *p, float *sum) {
  vector part[QUERIES][PARTS];
  for (int i = 0; i < queries; i++)
    for (int l = 0; l < parts; l++) part[i][l] = at(sum + i * head_dim + l * LANES);
  for (long t = 0; t < n; t++)
#pragma GCC unroll 4
    for (int i = 0; i < queries; i++)
#pragma GCC unroll 4
      for (int l = 0; l < parts; l++) part[i][l] += p[i * ROOM + t] * at(v + t * head_dim + l * LANES);
  for (int i = 0; i < queries; i++)
    for (int l = 0; l < parts; l++) put(sum + i * head_dim + l * LANES, part[i][l]);
}

/* Online softmax attention of some queries of a head over all blocks of its row, as many at a time as the score buffer
   holds. `top` is the maximum score so far, `mass` the sum of e^(score - top), and `sum` that of e^(score - top).value;
   both are rescaled when the maximum grows. */
INLINE void attend(const int queries, const struct row *row, const float *keys, const float *values, const float *q,
                float *sum) {
  long response_blocks = (row->response_keys + row->block_size - 1) / row->block_size;
  long head_dim = row->head_dim, blocks = row->prompt_blocks + response_blocks, whole = PARTS * LANES;
  float scores[QUERIES * ROOM], top[QUERIES], mass[QUERIES];
  for (int i = 0; i < queries; i++) top[i] = -INFINITY, mass[i] = 0;
  for (long first = 0, block = 0; block < blocks; first = block) {
    long count = 0;
    for (; block < blocks && count + row->block_size <= ROOM; block++) {
      long n = tokens(row, block);
      for (int i = 0; i < queries; i++)
        score(keys + place(row, block), n, head_dim, q + i * head_dim, scores + i * ROOM + count);
      count += n;
    }
    for (int i = 0; i < queries; i++) {
      float *p = scores + i * ROOM;
      for (long t = count; t % LANES; t++) p[t] = -INFINITY;
      vector high = all(top[i]), weights = all(0);
      for (long t = 0; t < count; t += LANES) high = larger(high, at(p + t));
      float highest = largest(high), kept = first ? exponential(all(top[i] - highest))[0] : 0;
      for (long t = 0; t < count; t += LANES) {
        vector e = exponential(at(p + t) - highest);
        put(p + t, e);
        weights += e;
      }
      top[i] = highest, mass[i] = mass[i] * kept + total(weights);
      for (long c = 0; c < head_dim; c += LANES)
        put(sum + i * head_dim + c, first ? at(sum + i * head_dim + c) * kept : all(0));
    }
    count = 0;
    for (; first < block; first++) {
      const float *v = values + place(row, first);
      long n = tokens(row, first), c = 0;
      for (; c + whole <= head_dim; c += whole) add(queries, PARTS, v + c, n, head_dim, scores + count, sum + c);
      for (; c < head_dim; c += LANES) add(queries, 1, v + c, n, head_dim, scores + count, sum + c);
      count += n;
    }
  }
  for (int i = 0; i < queries; i++)
    for (long c = 0; c < head_dim; c += LANES) put(sum + i * head_dim + c, at(sum + i * head_dim + c) / mass[i]);
}

/* RoPE: (a.cos - b.sin, b.cos + a.sin), where the first half of `sin` is negated. */
INLINE void rotate(const float *x, const float *cos, const float *sin, long head_dim, float scale,
                   float *restrict into) {
  long half = head_dim / 2;
  for (long c = 0; c < half; c++) {
    into[c] = (x[c] * cos[c] + x[c + half] * sin[c]) * scale;
    into[c + half] = (x[c + half] * cos[c + half] + x[c] * sin[c + half]) * scale;
  }
}

/* Paged attention of one new token per row, `out` `[row head head_dim]`. The rotated key and the value in `qkv` are
   first written to the response blocks, which hold `length` keys. LANES divides head_dim. */
void paged_attention(const float *qkv, const float *cos, const float *sin, long rows, long heads, long queries,
                     long head_dim, float scale, float *keys, float *values, long size, const int64_t *table,
                     long width, const int64_t *prompt_blocks, const int64_t *prompt_keys, const int64_t *length, float *out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (long unit = 0; unit < rows * heads; unit++) {
    long i = unit / heads, head = unit % heads;
    struct row row = {.blocks = table + i * width, .prompt_blocks = prompt_blocks[i], .prompt_keys = prompt_keys[i]};
    row.response_keys = length[i] + 1, row.block_size = size, row.head_dim = head_dim;
    row.offset = head * size * head_dim, row.stride = heads * size * head_dim;
    const float *own = qkv + i * heads * (queries + 2) * head_dim, *c = cos + i * head_dim, *s = sin + i * head_dim;
    float q[queries * head_dim], *sum = out + unit * queries * head_dim;
    long last = place(&row, prompt_blocks[i] + length[i] / size) + length[i] % size * head_dim;
    rotate(own + (heads * queries + head) * head_dim, c, s, head_dim, 1, keys + last);
    memcpy(values + last, own + (heads * (queries + 1) + head) * head_dim, head_dim * sizeof(float));
    for (long j = 0; j < queries; j++)
      rotate(own + (head * queries + j) * head_dim, c, s, head_dim, scale, q + j * head_dim);
    for (long j = 0; j < queries; j += QUERIES) {
      const float *those = q + j * head_dim;
      switch (smaller(queries - j, QUERIES)) {
        case 1: attend(1, &row, keys, values, those, sum + j * head_dim); break;
        case 2: attend(2, &row, keys, values, those, sum + j * head_dim); break;
        case 3: attend(3, &row, keys, values, those, sum + j * head_dim); break;
        case 4: attend(4, &row, keys, values, those, sum + j * head_dim); break;
      }
    }
  }
}

/* ---- sampling ---------------------------------------------------------------------------------------- */

#define BLOCK 256 /* tokens per block of the CDF */

INLINE float largest_of(const float *z, long vocab) {
  vector highest = all(-INFINITY);
  for (long j = 0; j + LANES <= vocab; j += LANES) highest = larger(highest, at(z + j));
  float high = largest(highest);
  for (long j = vocab / LANES * LANES; j < vocab; j++) high = z[j] > high ? z[j] : high;
  return high;
}

/* e^((z - high) / temperature) of a block of tokens, and their sum. */
INLINE float probabilities(const float *z, float high, long vocab, long block, float temperature, float *p) {
  long n = smaller(BLOCK, vocab - block * BLOCK);
  vector sum = all(0);
  for (long j = 0; j < BLOCK; j++) p[j] = j < n ? z[block * BLOCK + j] - high : -INFINITY;
  for (long j = 0; j < BLOCK; j += LANES) {
    put(p + j, exponential(at(p + j) / temperature));
    sum += at(p + j);
  }
  return total(sum);
}

/* Multinomial sampling by inverse CDF: for each row of logits the first token at which the cumulative sum of
   softmax(z / temperature) exceeds u times its total, and its log-prob. A token of probability 0 is never sampled. */
void sample(const float *logits, long rows, long vocab, float temperature, const double *u, int64_t *token, float *logp,
          int threads) {
  long blocks = (vocab + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < rows; i++) {
    const float *z = logits + i * vocab;
    float high = largest_of(z, vocab), p[BLOCK];
    double sums[blocks], mass = 0;
    for (long b = 0; b < blocks; b++) sums[b] = mass += probabilities(z, high, vocab, b, temperature, p);
    double point = u[i] * mass * (1 - 1e-12), before; /* below the total in spite of rounding */
    long b = 0, found = -1;
    while (b < blocks - 1 && !(sums[b] > point)) b++;
    before = b ? sums[b - 1] : 0;
    probabilities(z, high, vocab, b, temperature, p);
    for (long j = 0; j < smaller(BLOCK, vocab - b * BLOCK) && !(before > point); j++) {
      before += p[j];
      if (p[j] > 0) found = j;
    }
    token[i] = b * BLOCK + (found < 0 ? 0 : found);
    logp[i] = (z[token[i]] - high) / temperature - log(mass);
  }
}

/* ---- updates: forward and backward kernels ------------------------------------------------------------- */

/* Load or store the first `n` floats of a vector; missing ones are 0. */
INLINE vector load_part(const float *x, long n) {
  if (n >= LANES) return at(x);
  vector v = all(0);
  memcpy(&v, x, n * sizeof(float));
  return v;
}
INLINE void store_part(float *x, vector v, long n) {
  if (n >= LANES)
    put(x, v);
  else
    memcpy(x, &v, n * sizeof(float));
}

/* SwiGLU: silu(g).u */
void swiglu(const float *g, const float *u, long n, float *out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > FEW)
  for (long i = 0; i < n; i += LANES) {
    vector x = load_part(g + i, n - i);
    store_part(out + i, x * logistic(x) * load_part(u + i, n - i), n - i);
  }
}

/* Its gradients: d silu(g)/dg = s.(1 + g.(1 - s)), s = logistic(g). */
void swiglu_backward(const float *grad, const float *g, const float *u, long n, float *grad_g, float *grad_u,
                     int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > FEW)
  for (long i = 0; i < n; i += LANES) {
    vector d = load_part(grad + i, n - i), x = load_part(g + i, n - i), s = logistic(x);
    store_part(grad_g + i, d * load_part(u + i, n - i) * s * (1 + x * (1 - s)), n - i);
    store_part(grad_u + i, d * x * s, n - i);
  }
}

/* RoPE of heads `[position head head_dim]` with these strides; `back` rotates by the negative angles. `out` is
   contiguous. */
void rope(const float *x, long positions, long heads, long head_dim, long by_position, long by_head, const float *cos,
            const float *sin, int back, float *out, int threads) {
  long half = head_dim / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (positions * heads * head_dim > FEW)
  for (long unit = 0; unit < positions * heads; unit++) {
    long position = unit / heads;
    const float *x_a = x + position * by_position + unit % heads * by_head, *x_b = x_a + half;
    const float *c = cos + position * head_dim, *s = sin + position * head_dim;
    float *to_a = out + unit * head_dim, *to_b = to_a + half;
    for (long j = 0; j < half; j += LANES) {
      long n = half - j;
      vector a = load_part(x_a + j, n), cos_a = load_part(c + j, n), sin_a = load_part(s + j, n);
      vector b = load_part(x_b + j, n), cos_b = load_part(c + half + j, n), sin_b = load_part(s + half + j, n);
      store_part(to_a + j, a * cos_a + b * (back ? sin_b : -sin_a), n);
      store_part(to_b + j, b * cos_b + a * (back ? -sin_a : sin_b), n);
    }
  }
}

/* RMSNorm: out = w.n with n = x.r, r = 1 / sqrt(mean x^2 + eps). */
void rms_norm(const float *x, const float *weight, float eps, long rows, long width, float *out, float *r,
              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > FEW)
  for (long i = 0; i < rows; i++) {
    const float *row = x + i * width;
    vector squares = all(0);
    for (long j = 0; j < width; j += LANES) squares += load_part(row + j, width - j) * load_part(row + j, width - j);
    r[i] = 1 / sqrtf(total(squares) / width + eps);
    for (long j = 0; j < width; j += LANES)
      store_part(out + i * width + j, load_part(row + j, width - j) * r[i] * load_part(weight + j, width - j), width - j);
  }
}

#define NORM_BLOCK_ROWS 64 /* rows per partial sum of g.n */
long norm_block_rows(void) { return NORM_BLOCK_ROWS; }

/* Its gradients: r.(g.w - n.mean(g.w.n)) for x, and the sum of g.n over rows for w. `sums` holds one partial sum per
   NORM_BLOCK_ROWS rows, so that the order of summation does not depend on the number of threads. */
void rms_norm_backward(const float *grad, const float *x, const float *weight, const float *r, long rows, long width,
                float *grad_x, float *sums, float *grad_weight, int threads) {
  long blocks = (rows + NORM_BLOCK_ROWS - 1) / NORM_BLOCK_ROWS;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > FEW)
  for (long b = 0; b < blocks; b++) {
    float *sum = sums + b * width;
    memset(sum, 0, width * sizeof(float));
    for (long i = b * NORM_BLOCK_ROWS; i < smaller(rows, (b + 1) * NORM_BLOCK_ROWS); i++) {
      const float *row = x + i * width, *g = grad + i * width;
      vector along = all(0);
      for (long j = 0; j < width; j += LANES) {
        vector gn = load_part(g + j, width - j) * load_part(row + j, width - j) * r[i];
        along += gn * load_part(weight + j, width - j);
        store_part(sum + j, load_part(sum + j, width - j) + gn, width - j);
      }
      float mean = total(along) / width;
      for (long j = 0; j < width; j += LANES) {
        vector n = load_part(row + j, width - j) * r[i], gw = load_part(g + j, width - j) * load_part(weight + j, width - j);
        store_part(grad_x + i * width + j, r[i] * (gw - n * mean), width - j);
      }
    }
  }
  memset(grad_weight, 0, width * sizeof(float));
  for (long b = 0; b < blocks; b++)
    for (long j = 0; j < width; j++) grad_weight[j] += sums[b * width + j];
}

/* Softmax in place; for each row log p of its target token, and the entropy. */
void softmax_logprobs(float *z, const int64_t *target, long rows, long vocab, float *logp, float *entropy,
                      int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < rows; i++) {
    float *row = z + i * vocab, high = largest_of(row, vocab), own = row[target[i]];
    double mass = 0, mean = 0;
    for (long block = 0; block < vocab; block += BLOCK) {
      vector sum = all(0), weighed = all(0);
      for (long j = block; j < smaller(vocab, block + BLOCK); j += LANES) {
        vector x = load_part(row + j, vocab - j) - high;
        if (vocab - j < LANES)
          for (long l = vocab - j; l < LANES; l++) x[l] = -INFINITY;
        vector e = exponential(x);
        store_part(row + j, e, vocab - j);
        sum += e, weighed += e * larger(x, all(-87.0f)); /* e is 0 below */
      }
      mass += total(sum), mean += total(weighed);
    }
    logp[i] = own - high - log(mass), entropy[i] = log(mass) - mean / mass;
    float share = 1 / mass;
    for (long j = 0; j < vocab; j++) row[j] *= share;
  }
}
