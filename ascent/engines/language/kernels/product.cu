// x·Wᵀ for the rows of a decoding step on Hopper. hopper.py says what a program computes, and defines the names in
// capitals. One warp asks the copy engine for tiles of 64 columns of x and W, STAGES of them ahead; the warpgroups
// before it multiply, 64·HIGH rows each. The first tiles of W are asked for before earlier kernels are complete.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct alignas(64) Map {
  char bytes[128];
};

constexpr int ROWS = 64 * GROUPS * HIGH, OF_X = ROWS * 128, OF_W = WIDE * 128, STAGE = OF_X + OF_W;
constexpr int OUT = GATE ? WIDE / 2 : WIDE;
constexpr int PITCH = GATE ? OUT * 2 : OUT * 2 + 16;  // bytes between rows of a warp's result, which lie in other banks

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\n"
      "DONE:\n}\n" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void load_x(u32 to, const Map* map, int block, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
      "r"(to), "l"(map), "r"(block * 64), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void load_w(u32 to, const Map* map, int block, int tile, u32 barrier) {
#if GATE  // four rows of the gate, the same four of up, and so on
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %3, %4}], [%5];" ::
      "r"(to), "l"(map), "r"(block * 64), "r"(0), "r"(tile * (WIDE / 8)), "r"(barrier) : "memory");
#else
  load_x(to, map, block, tile * WIDE, barrier);
#endif
}

__device__ __forceinline__ u64 described(u32 tile) {  // rows of 128 bytes, swizzled, eight of them 1,024 bytes apart
  return (u64)((tile & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 both;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float widened(u16 x) {
#if FLOAT16
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x));
  return result;
#else
  return __uint_as_float((u32)x << 16);
#endif
}

__device__ __forceinline__ float low(u32 both) { return widened((u16)both); }
__device__ __forceinline__ float high(u32 both) { return widened((u16)(both >> 16)); }

__device__ __forceinline__ float active(float x) {  // as `active` in products.py
  const float z = GATE == 2 ? 1.5957691216057308f * (x + 0.044715f * x * x * x) : x;
  float e, result;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(-z * 1.4426950408889634f));
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(1.0f + e));
  return result;
}

// sum += a·bᵀ, or sum = a·bᵀ, over 16 columns.
__device__ __forceinline__ void multiply(float (&sum)[WIDE / 2], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %" ADD ", 0;\n"
      "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" SUMS "}, %" A ", %" B ", p, 1, 1, 0, 0;\n}\n"
      : OUTPUTS : "l"(a), "l"(b), "r"(add));
}

__device__ __forceinline__ void ask(u32 base, u32 full, const Map* of_x, const Map* of_w, int row, int tile, int begun,
                                    int count) {
  const u32 free = full + 8 * STAGES;
  const int first = min(STAGES, count);
  for (int i = 0; i < first; i++) {
    expect(full + 8 * i, STAGE);
    load_w(base + i * STAGE + OF_X, of_w, begun + i, tile, full + 8 * i);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = 0; i < first; i++) load_x(base + i * STAGE, of_x, begun + i, row, full + 8 * i);
  int stage = 0;
  u32 phase = 0;
  for (int i = STAGES; i < count; i++) {
    wait(free + 8 * stage, phase);
    expect(full + 8 * stage, STAGE);
    load_w(base + stage * STAGE + OF_X, of_w, begun + i, tile, full + 8 * stage);
    load_x(base + stage * STAGE, of_x, begun + i, row, full + 8 * stage);
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
}

// A thread has columns 8g + 2q and 8g + 2q + 1 of rows r and r + 8, for all g; its warp has 16 rows from `top` on.

__device__ __forceinline__ void store_parts(const float (&sum)[WIDE / 2], float* out, int top, int rows, int width,
                                            int tile, int lane) {
  const int row = top + lane / 4;
  float* to = out + ((long long)blockIdx.z * rows + row) * width + tile * WIDE + lane % 4 * 2;
#pragma unroll
  for (int g = 0; g < WIDE / 8; g++) {
    if (tile * WIDE + g * 8 >= width) break;
    if (row < rows) *(float2*)(to + g * 8) = make_float2(sum[4 * g], sum[4 * g + 1]);
    if (row + 8 < rows) *(float2*)(to + 8ll * width + g * 8) = make_float2(sum[4 * g + 2], sum[4 * g + 3]);
  }
}

__device__ __forceinline__ void store(const float (&sum)[WIDE / 2], unsigned char* staged, u16* out, int top, int rows,
                                      int width, int tile, int lane) {
  const int q = lane % 4, r = lane / 4;
  __syncwarp();
#pragma unroll
  for (int g = 0; g < WIDE / 8; g++) {
    const u32 first = rounded(sum[4 * g], sum[4 * g + 1]), second = rounded(sum[4 * g + 2], sum[4 * g + 3]);
#if GATE  // half of the threads have the gate and half have up: each pair of them shares out its two rows
    const bool has_up = q >= 2;
    const u32 other = __shfl_xor_sync(0xFFFFFFFFu, has_up ? first : second, 2);
    const u32 gate = has_up ? other : first, up = has_up ? second : other;
    const u32 act = rounded(active(low(gate)), active(high(gate)));
    u32* to = (u32*)(staged + (r + (has_up ? 8 : 0)) * PITCH + g * 8 + q % 2 * 4);
    *to = rounded(low(act) * low(up), high(act) * high(up));
#else
    *(u32*)(staged + r * PITCH + g * 16 + q * 4) = first;
    *(u32*)(staged + (r + 8) * PITCH + g * 16 + q * 4) = second;
#endif
  }
  __syncwarp();
#if GATE
  typedef uint2 Unit;
#else
  typedef uint4 Unit;
#endif
  constexpr int UNITS = OUT * 2 / sizeof(Unit);
  for (int i = lane; i < 16 * UNITS; i += 32) {
    const int row = top + i / UNITS, column = tile * OUT + i % UNITS * (int)(sizeof(Unit) / 2);
    if (row < rows && column < width)
      *(Unit*)(out + (long long)row * width + column) =
          *(Unit*)(staged + i / UNITS * PITCH + i % UNITS * sizeof(Unit));
  }
}

extern "C" __global__ void __launch_bounds__(128 * GROUPS + 32, 1)
    product(const __grid_constant__ Map of_x, const __grid_constant__ Map of_w, const u16* bias, void* out, int rows,
            int width, int blocks) {
  extern __shared__ unsigned char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u, full = base + STAGES * STAGE, free = full + 8 * STAGES;
  unsigned char* staged = memory + (free + 8 * STAGES - shared_address(memory) + 15) / 16 * 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
  const int tile = blockIdx.x, row = blockIdx.y * ROWS, begun = blockIdx.z * BLOCKS;
  const int count = min(BLOCKS, blocks - begun);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) init(full + 8 * i, 1), init(free + 8 * i, GROUPS * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (warp == GROUPS * 4) {
    if (lane == 0) ask(base, full, &of_x, &of_w, row, tile, begun, count);
    return;
  }
  float sum[HIGH][WIDE / 2];
#pragma unroll
  for (int i = 0; i < WIDE / 2 && BIAS; i++) {
    const int column = tile * WIDE + i / 4 * 8 + lane % 4 * 2 + i % 2;
    const float begin = column < width && begun == 0 ? widened(bias[column]) : 0.0f;
#pragma unroll
    for (int h = 0; h < HIGH; h++) sum[h][i] = begin;
  }
  int stage = 0;
  u32 phase = 0;
  for (int i = 0; i < count; i++) {
    wait(full + 8 * stage, phase);
    const u64 a = described(base + stage * STAGE + group * HIGH * 8192), b = described(base + stage * STAGE + OF_X);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int h = 0; h < HIGH; h++) multiply(sum[h], a + h * 512 + k * 2, b + k * 2, BIAS | i | k);
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (lane == 0 && i > 0) arrive(free + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int h = 0; h < HIGH; h++) {
    const int top = row + (group * HIGH + h) * 64 + warp % 4 * 16;
#if PARTS
    store_parts(sum[h], (float*)out, top, rows, width, tile, lane);
#else
    store(sum[h], staged + warp * 16 * PITCH, (u16*)out, top, rows, width, tile, lane);
#endif
  }
}
