/* A machine that runs PTX of sm_90a and sm_100a on the CPU: the memory, the barriers and the
 * products of a GPU, one instruction of one warp after the other, in an order that a seed draws.
 *
 * What PTX leaves open is drawn as well: which warp goes on, and when a bulk copy arrives. What a
 * kernel may not do ends the run with a message: addresses outside of the given tensors or of shared
 * memory, misaligned addresses, messages to blocks that have ended, instructions of a whole warp
 * that some of its threads do not reach, products that read what was written to shared memory
 * without a fence of the asynchronous proxy, waits that nothing ends; tensor memory that is not
 * allocated or not given back, and accesses to it that no tcgen05.fence orders.
 *
 * Sources: NVIDIA, PTX ISA 8.8 (instructions; fragments and matrix descriptors of wgmma; layouts of
 * tensor memory and instruction descriptors of tcgen05). The bits
 * of a tensor map were read off those that the DSL writes on the host.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 32, SHARED = 233472, MAX_BARRIERS = 16, SLICE = 48, PATIENCE = 2000 };
enum { ROWS = 128, COLUMNS = 512, EIGHTHS = 8, TRANSFERS = 64 }; /* of tensor memory */
#define FULL 0xffffffffu

/* ------------------------------------------------------------------------------------ a program */

typedef struct instruction {
    int32_t op;        /* index in the table of operations below */
    int32_t predicate; /* 2 * register + negated, or -1 */
    int32_t first;     /* of its operands in program.operands */
    int32_t count;
    int32_t target;    /* of a branch */
    int32_t extra[5];  /* what the name says beyond the operation, see `decode` in run.py */
} instruction;

typedef struct {
    const instruction *code;
    int32_t length;
    const int32_t *operands;
    int32_t registers;
    const int32_t *constant_registers;
    const int64_t *constants;
    int32_t constant_count;
    const int32_t *special_registers;
    const int32_t *specials; /* which one: 4 * (tid, ctaid, ntid, nctaid, ...) + axis */
    int32_t special_count;
    int32_t local; /* bytes that each thread has for itself */
} program;

typedef struct {
    uint64_t low, high;
    int32_t writable;
} extent;

typedef struct {
    uint32_t grid[3], block[3], cluster[3];
    uint64_t shared_end; /* first byte of shared memory that the block does not have */
    uint8_t *parameters;
    const extent *memory;
    int32_t extents;
    int32_t resident;    /* clusters that run at the same time */
    uint32_t seed;
    int32_t late;        /* products run as late as they may; else at once */
    int64_t limit;       /* instructions of warps before the run is given up */
} launch;

/* ------------------------------------------------------------------------------- the machine */

typedef struct {
    int32_t pc[LANES];
    uint32_t alive;
    int32_t waiting;          /* 0 runs, 1 named barrier, 2 cluster barrier, 3 just yielded */
    int32_t cluster_phase;    /* arrivals at the cluster barrier so far */
    uint32_t fence;           /* number of proxy fences so far, see `stamp` */
    int32_t groups, out_groups; /* groups of products, of copies to global memory */
    int64_t after;            /* time of the last tcgen05.fence::after_thread_sync */
    struct { const struct instruction *i; uint32_t address; } transfers[TRANSFERS];
    int32_t transfer_count;   /* loads and stores of tensor memory that nobody has waited for */
    int32_t called;           /* it waits for a warp of the other block of a pair */
    uint64_t *r;              /* registers, [register][lane] */
    uint8_t carry[LANES];     /* the flag of add.cc and its like */
    uint8_t *local;           /* memory of the threads, [lane][byte] */
} warp;

typedef struct {
    int32_t arrived, expected, waiting_warps;
} named_barrier;

/* A column of tensor memory, as 16 lanes of a warp reach it: times of the
 * last product that wrote it, and of the last access of a warp, until a product has followed. */
typedef struct {
    int64_t done, touched, published; /* by tcgen05.fence::before_thread_sync */
    int32_t toucher, taken;
} column;

typedef struct {
    uint32_t *tensor;         /* [lane][column]; NULL until some are allocated */
    column *columns;          /* [eighth][column] */
    uint8_t *shared;
    uint32_t *stamp;          /* for every 16 bytes: writer and its fence count; 0 if fenced */
    named_barrier barriers[MAX_BARRIERS];
    warp *warps;
    int32_t warp_count, alive_warps;
    int32_t calls;            /* instructions so far that warps of both blocks of a pair run */
    int32_t offered;          /* 1 + the first column that the other block of a pair has taken */
    uint32_t id[3], rank;
    struct cluster *cluster;
} block;

typedef struct cluster {
    block *blocks;
    int32_t count, alive;
    int32_t phase;
    int32_t refused; /* it has asked for another cluster in vain */
    struct cluster *next;
} cluster;

/* A bulk copy that is under way: to shared memory, or `out` of it. */
typedef struct {
    block *to;
    uint64_t map, source;
    uint32_t address, barrier, bytes;
    int32_t rank, coordinates[5], kind; /* 0 tensor, 1 linear, 2 store of values */
    uint64_t values[4];
    int32_t width, live, pc, group;
    warp *w;
} copy;

/* A product that was issued and has not run. */
typedef struct {
    warp *w;
    block *b;
    const instruction *i;
    int32_t group;
    uint64_t a, bd;
    int32_t scale;
} product;

/* A product of tcgen05, or the arrival of those before it on a barrier. */
typedef struct {
    warp *w;
    block *b;
    const instruction *i;
    uint32_t d, shape, barrier, ranks;
    uint64_t a, bd;
    int32_t adds;
} issued;

/* marks an answer to a block that has asked for another one */
enum { ANSWER = 0x5EED0000 };
enum { COPIES = 65536, PRODUCTS = 65536 };

static __thread struct {
    const program *p;
    const launch *l;
    uint32_t random;
    copy *copies, *outs;
    int32_t copy_count, out_count;
    product *products;
    int32_t product_count;
    issued *queue; /* what the tensor cores have before them */
    int32_t queued;
    int64_t clock;
    uint32_t clusters, next; /* of the launch; the first that neither runs nor was handed out */
    int64_t steps, changes; /* instructions; those that another warp may wait for */
    char message[1024];
    jmp_buf failed;
    int too_large;
    const instruction *now;
    block *b;
    int32_t now_warp;
} M;

static void fail(const char *format, ...)
{
    va_list args;
    int at = 0;
    if (M.now)
        at = snprintf(M.message, sizeof M.message, "instruction %d, block %u %u %u, warp %d: ",
                      (int)(M.now - M.p->code), M.b->id[0], M.b->id[1], M.b->id[2], M.now_warp);
    va_start(args, format);
    vsnprintf(M.message + at, sizeof M.message - at, format, args);
    va_end(args);
    longjmp(M.failed, 1);
}

static uint32_t draw(void)
{
    M.random ^= M.random << 13;
    M.random ^= M.random >> 17;
    M.random ^= M.random << 5;
    return M.random;
}

/* --------------------------------------------------------------------------- numbers and bits */

static float as_f32(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static uint32_t of_f32(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }
static double as_f64(uint64_t bits) { double f; memcpy(&f, &bits, 8); return f; }
static uint64_t of_f64(double f) { uint64_t b; memcpy(&b, &f, 8); return b; }

static float f16_to_f32(uint16_t h)
{
    _Float16 f;
    memcpy(&f, &h, 2);
    return (float)f;
}

static uint16_t f32_to_f16(float f)
{
    _Float16 h = (_Float16)f;
    uint16_t b;
    memcpy(&b, &h, 2);
    return isnan(f) ? 0x7fff : b;
}

static float bf16_to_f32(uint16_t h) { return as_f32((uint32_t)h << 16); }

static uint16_t f32_to_bf16(float f)
{
    uint32_t b = of_f32(f);
    if (isnan(f))
        return 0x7fff;
    return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}

/* rounded once: where a float does not hold the integer, towards 0 first, with an odd last bit */
static uint16_t integer_to_bf16(long double x)
{
    float f = (float)x;
    if ((long double)f != x) {
        if (fabsl((long double)f) > fabsl(x))
            f = nextafterf(f, 0);
        f = as_f32(of_f32(f) | 1);
    }
    return f32_to_bf16(f);
}

/* kinds of 16-bit numbers: 0 f16, 1 bf16 */
static float from16(int bf, uint16_t h) { return bf ? bf16_to_f32(h) : f16_to_f32(h); }
static uint16_t to16(int bf, float f) { return bf ? f32_to_bf16(f) : f32_to_f16(f); }

/* a * b + c of 16-bit numbers and an fp32 one; a sum has b = 1. */
enum { ONE_F16 = 0x3c00, ONE_BF16 = 0x3f80 };
static uint32_t mixed(int bf, uint32_t a, uint32_t b, float c)
{
    return of_f32(fmaf(from16(bf, (uint16_t)a), from16(bf, (uint16_t)b), c));
}

/* Two fp32 numbers at once: 0 a * b + c, 1 a + b, 2 a * b, 3 a - b. */
static uint64_t pair(uint64_t a, uint64_t b, int how, uint64_t c)
{
    uint64_t result = 0;
    for (int h = 0; h < 2; h++) {
        float x = as_f32((uint32_t)(a >> 32 * h)), y = as_f32((uint32_t)(b >> 32 * h));
        float z = how == 0 ? fmaf(x, y, as_f32((uint32_t)(c >> 32 * h)))
                           : how == 1 ? x + y : how == 2 ? x * y : x - y;
        result |= (uint64_t)of_f32(z) << 32 * h;
    }
    return result;
}

/* One operation on both halves; the result is rounded once, as the device does. */
#define HALVES(bf, expression)                                                                     \
    uint32_t result = 0;                                                                           \
    for (int h = 0; h < 2; h++) {                                                                  \
        float x = from16(bf, (uint16_t)(a >> 16 * h)), y = from16(bf, (uint16_t)(b >> 16 * h)),    \
              z = from16(bf, (uint16_t)(c >> 16 * h));                                             \
        (void)y, (void)z;                                                                          \
        result |= (uint32_t)to16(bf, (float)(expression)) << 16 * h;                               \
    }                                                                                              \
    return result

static float max_nan(float x, float y) { return isnan(x) || isnan(y) ? NAN : fmaxf(x, y); }
static float min_nan(float x, float y) { return isnan(x) || isnan(y) ? NAN : fminf(x, y); }
static uint32_t add2(int bf, uint32_t a, uint32_t b, uint32_t c) { HALVES(bf, x + y); }
static uint32_t sub2(int bf, uint32_t a, uint32_t b, uint32_t c) { HALVES(bf, x - y); }
static uint32_t mul2(int bf, uint32_t a, uint32_t b, uint32_t c) { HALVES(bf, x * y); }
static uint32_t fma2(int bf, uint32_t a, uint32_t b, uint32_t c) { HALVES(bf, (double)x * y + z); }
static uint32_t max2(int bf, uint32_t a, uint32_t b, uint32_t c) { HALVES(bf, fmaxf(x, y)); }
static uint32_t min2(int bf, uint32_t a, uint32_t b, uint32_t c) { HALVES(bf, fminf(x, y)); }
static uint32_t maxn2(int bf, uint32_t a, uint32_t b, uint32_t c) { HALVES(bf, max_nan(x, y)); }
static uint32_t minn2(int bf, uint32_t a, uint32_t b, uint32_t c) { HALVES(bf, min_nan(x, y)); }

static uint32_t permute(uint32_t a, uint32_t b, uint32_t how)
{
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t s = how >> 4 * i & 15, byte = both >> 8 * (s & 7) & 255;
        if (s & 8)
            byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}

static uint32_t extract(uint32_t a, uint32_t at, uint32_t bits, int with_sign)
{
    at &= 255, bits &= 255;
    uint64_t wide = with_sign ? (uint64_t)(int64_t)(int32_t)a : a;
    uint32_t got = at > 63 ? (with_sign && (int32_t)a < 0 ? FULL : 0)
                           : (with_sign ? (uint64_t)((int64_t)wide >> at) : wide >> at);
    if (bits == 0)
        return 0;
    if (bits < 32) {
        got &= (1u << bits) - 1;
        if (with_sign && got >> (bits - 1) & 1)
            got |= FULL << bits;
    }
    return got;
}

static uint32_t insert(uint32_t a, uint32_t into, uint32_t at, uint32_t bits)
{
    at &= 255, bits &= 255;
    if (at > 31 || bits == 0)
        return into;
    uint32_t mask = (bits > 31 ? FULL : (1u << bits) - 1) << at;
    return (into & ~mask) | (a << at & mask);
}

/* Sum of products of the `count` parts of a, of 32 / count bits, and as many bytes of b. */
static uint32_t dot(uint32_t a, uint32_t b, uint32_t sum, int count, int first)
{
    int bits = 32 / count;
    for (int i = 0; i < count; i++)
        sum += (a >> bits * i & (FULL >> (32 - bits))) * (b >> 8 * (first + i) & 255);
    return sum;
}

static uint32_t funnel(uint32_t low, uint32_t high, uint32_t by, int left)
{
    uint64_t both = (uint64_t)high << 32 | low;
    return left ? (uint32_t)(both << by >> 32) : (uint32_t)(both >> by);
}

static uint32_t lookup3(uint32_t a, uint32_t b, uint32_t c, uint32_t table)
{
    uint32_t result = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1)
            result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return result;
}

static float flushed(float f) { return fabsf(f) < 0x1p-126f ? copysignf(0, f) : f; }

/* A value with the 11 digits that tanh.approx has. */
static float coarse(float f)
{
    return f == 0 || isnan(f) ? f : f - fmodf(f, ldexpf(1, ilogbf(f) - 10));
}

/* A value rounded up or down, given what it is rounded to the nearest. */
static float rounded(double exact, float nearest, int up)
{
    if (isnan(nearest) || nearest == exact)
        return nearest;
    if (up)
        return nearest < exact ? nextafterf(nearest, INFINITY) : nearest;
    return nearest > exact ? nextafterf(nearest, -INFINITY) : nearest;
}

static uint64_t resized(uint64_t a, int bits, int with_sign)
{
    int drop = 64 - bits;
    return with_sign ? (uint64_t)((int64_t)(a << drop) >> drop) : a << drop >> drop;
}

static int64_t to_int(double f, double low, double high)
{
    if (isnan(f))
        return 0;
    return f <= low ? (int64_t)low : f >= high ? (int64_t)high : (int64_t)f;
}

/* ---------------------------------------------------------------------------- global memory */

static uint8_t *global_at(uint64_t address, uint64_t bytes, int write)
{
    for (int i = 0; i < M.l->extents; i++) {
        const extent *e = M.l->memory + i;
        if (address >= e->low && address + bytes <= e->high) {
            if (write && !e->writable)
                fail("writes to tensor %d, which is an input", i);
            return (uint8_t *)(uintptr_t)address;
        }
    }
    for (int i = 0; i < M.l->extents; i++)
        if (address + bytes + 4096 > M.l->memory[i].low && address < M.l->memory[i].high + 4096)
            fail("address %lld bytes from the beginning of tensor %d, which has %lld",
                 (long long)(address - M.l->memory[i].low), i,
                 (long long)(M.l->memory[i].high - M.l->memory[i].low));
    fail("address %#llx outside of all tensors", (unsigned long long)address);
    return NULL;
}

/* ---------------------------------------------------------------------------- shared memory */

static block *owner(block *b, uint32_t *address)
{
    uint32_t rank = *address >> 24;
    *address &= 0xffffff;
    if (rank == 0)
        return b;
    if ((int)rank > b->cluster->count)
        fail("block %u of a cluster of %d", rank - 1, b->cluster->count);
    block *there = b->cluster->blocks + rank - 1;
    if (there->alive_warps == 0)
        fail("shared memory of block %u of the cluster, which has ended", rank - 1);
    return there;
}

static uint8_t *shared_at(block *b, uint32_t address, uint32_t bytes)
{
    b = owner(b, &address);
    if (address + (uint64_t)bytes > M.l->shared_end)
        fail("byte %u of shared memory, of which there are %llu", address,
             (unsigned long long)M.l->shared_end);
    return b->shared + address;
}

static void written(block *b, uint32_t address, uint32_t bytes)
{
    b = owner(b, &address);
    uint32_t unknown = b != M.b, stamp = ((uint32_t)M.now_warp + 1) << 24 | (M.b->warps[M.now_warp].fence & 0xffffff);
    for (uint32_t at = address / 16; at <= (address + bytes - 1) / 16; at++)
        b->stamp[at] = unknown ? 0 : stamp; /* of another block: not followed */
}

/* Let the asynchronous proxy touch bytes: their last writer must have fenced since. */
static void proxy(block *b, uint32_t address, uint32_t bytes, int write)
{
    b = owner(b, &address);
    for (uint32_t at = address / 16; at <= (address + bytes - 1) / 16; at++) {
        uint32_t stamp = b->stamp[at];
        if (!write && stamp && (b->warps[(stamp >> 24) - 1].fence & 0xffffff) == (stamp & 0xffffff))
            fail("the asynchronous proxy reads byte %u of shared memory, which warp %u wrote "
                 "without a fence.proxy.async", at * 16, (stamp >> 24) - 1);
        b->stamp[at] = 0;
    }
}

/* ------------------------------------------------------------------------------- mbarriers */

/* Eight bytes: a mark, the phase, arrivals expected and missing, bytes missing. */
typedef struct { int32_t phase, expected, missing; int64_t bytes; int valid; } mbarrier;

static mbarrier barrier_read(uint8_t *p)
{
    uint64_t w;
    mbarrier m;
    memcpy(&w, p, 8);
    m.valid = (w >> 56) == 0xB7;
    m.phase = w >> 55 & 1;
    m.expected = w >> 44 & 0x7ff;
    m.missing = w >> 33 & 0x7ff;
    m.bytes = (int64_t)(w & 0x1ffffffffull) - 0x80000000ll;
    if (!m.valid)
        fail("a barrier in shared memory that was not initialised, or was written over");
    return m;
}

static void barrier_write(uint8_t *p, mbarrier m)
{
    if (m.missing == 0 && m.bytes == 0)
        m.phase ^= 1, m.missing = m.expected;
    uint64_t w = 0xB7ull << 56 | (uint64_t)m.phase << 55 | (uint64_t)m.expected << 44
                 | (uint64_t)m.missing << 33 | (uint64_t)(m.bytes + 0x80000000ll);
    memcpy(p, &w, 8);
}

static void barrier_init(uint8_t *p, int32_t count)
{
    mbarrier m = { 0, count, count, 0, 1 };
    if (count < 1 || count > 2047)
        fail("a barrier for %d arrivals", count);
    barrier_write(p, m);
}

static void barrier_arrive(uint8_t *p, int32_t count, int64_t expect)
{
    mbarrier m = barrier_read(p);
    m.bytes += expect;
    m.missing -= count;
    if (m.missing < 0)
        fail("a barrier got more arrivals than the %d it expects", m.expected);
    barrier_write(p, m);
}

static void barrier_complete(uint8_t *p, int64_t bytes)
{
    mbarrier m = barrier_read(p);
    m.bytes -= bytes;
    barrier_write(p, m);
}

/* ------------------------------------------------------------------------------ bulk copies */

typedef struct {
    uint8_t *base;
    uint64_t extent[5], stride[5]; /* strides in bytes */
    uint32_t box[5], element, swizzle;
    int32_t rank, rounds; /* fp32 arrives as TF32 */
} tensor_map;

static tensor_map read_map(uint64_t address)
{
    static const uint8_t sizes[16] = { 1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4 };
    uint8_t *raw = (uint8_t *)(uintptr_t)address;
    uint32_t word[16];
    tensor_map m;
    uint64_t base;
    if (address < (uintptr_t)M.l->parameters || address >= (uintptr_t)M.l->parameters + 4096)
        fail("a tensor map that is no parameter");
    memcpy(word, raw, 64);
    memcpy(&base, raw, 8);
    m.base = (uint8_t *)(uintptr_t)base;
    m.rank = (word[2] >> 4 & 7) + 1;
    m.element = sizes[word[2] >> 7 & 15];
    m.rounds = word[2] >> 16 & 1;
    m.swizzle = word[2] >> 13 & 3;
    m.stride[0] = m.element;
    for (int i = 0; i < 5; i++) {
        m.extent[i] = (uint64_t)word[8 + i] + 1;
        m.box[i] = i < m.rank ? (i == 0 ? raw[55] : raw[56 + i - 1]) + 1u : 1;
        if (i)
            m.stride[i] = ((uint64_t)word[3 + i - 1] | (uint64_t)(word[7] >> 4 * (i - 1) & 15) << 32)
                          * 16;
    }
    return m;
}

static uint32_t swizzled(uint32_t address, uint32_t kind)
{
    return address ^ ((address >> 7 & ((1u << kind) - 1)) << 4);
}

static void round_tf32(uint8_t *at)
{
    uint32_t bits;
    memcpy(&bits, at, 4);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000u;
    memcpy(at, &bits, 4);
}

/* Copies a box between global memory and shared memory from `at` on; outside is read as zero and
 * not written. */
static void run_tensor_copy(copy *c, int out)
{
    tensor_map m = read_map(c->map);
    if (m.rank != c->rank) /* an H200: an illegal instruction was encountered */
        fail("a copy of %d dimensions with a tensor map of %d", c->rank, m.rank);
    uint64_t box[5] = { 0 };
    uint32_t at = c->address, row = m.box[0] * m.element;
    int i;
    do {
        int inside = 1;
        int64_t offset = 0;
        for (i = 1; i < m.rank; i++) {
            int64_t x = (int64_t)c->coordinates[i] + (int64_t)box[i];
            inside &= x >= 0 && x < (int64_t)m.extent[i];
            offset += x * (int64_t)m.stride[i];
        }
        if (out)
            proxy(c->to, at, row, 0);
        for (uint32_t e = 0; e < m.box[0]; e++) {
            int64_t x = (int64_t)c->coordinates[0] + e;
            uint8_t *here = shared_at(c->to, swizzled(at + e * m.element, m.swizzle), m.element);
            if (inside && x >= 0 && x < (int64_t)m.extent[0]) {
                uint64_t there = (uint64_t)(uintptr_t)(m.base + offset) + (uint64_t)x * m.element;
                uint8_t *p = global_at(there, m.element, out);
                memcpy(out ? p : here, out ? here : p, m.element);
                if (m.rounds && !out)
                    round_tf32(here);
            } else if (!out)
                memset(here, 0, m.element);
        }
        if (!out)
            proxy(c->to, at, row, 1);
        at += row;
        for (i = 1; i < m.rank && ++box[i] == m.box[i]; i++)
            box[i] = 0;
    } while (i < m.rank);
    c->bytes = at - c->address;
}

static void finish(copy *c)
{
    M.b = c->to, M.now = M.p->code + c->pc;
    if (c->to->alive_warps == 0)
        fail("a copy to a block that has ended");
    if (c->kind == 0)
        run_tensor_copy(c, 0);
    else if (c->kind == 1) {
        memcpy(shared_at(c->to, c->address, c->bytes), global_at(c->source, c->bytes, 0), c->bytes);
        proxy(c->to, c->address, c->bytes, 1);
    } else
        for (int i = 0; i < c->width; i++)
            memcpy(shared_at(c->to, c->address + 4 * i, 4), &c->values[i], 4);
    barrier_complete(shared_at(c->to, c->barrier, 8), c->bytes);
    c->live = 0;
    M.now = NULL;
}

/* Runs the copies to global memory of a warp that belong to groups up to `group`. */
static void finish_out(warp *w, int group)
{
    int kept = 0;
    for (int i = 0; i < M.out_count; i++) {
        copy *c = M.outs + i;
        if (c->w != w || c->group > group) {
            M.outs[kept++] = *c;
            continue;
        }
        if (c->kind == 0)
            run_tensor_copy(c, 1);
        else {
            proxy(c->to, c->address, c->bytes, 0);
            memcpy(global_at(c->source, c->bytes, 1), shared_at(c->to, c->address, c->bytes),
                   c->bytes);
        }
    }
    M.out_count = kept;
}

static void start_out(copy c)
{
    if (M.out_count == COPIES)
        fail("too many copies under way");
    M.outs[M.out_count++] = c;
    if (!M.l->late)
        finish_out(c.w, INT32_MAX);
}

static void start(copy c)
{
    c.pc = (int32_t)(M.now - M.p->code);
    c.live = 1;
    if (M.copy_count == COPIES)
        fail("too many copies under way");
    M.copies[M.copy_count++] = c;
}

/* Lets some copies arrive; all of one if `all`. Returns how many did. */
static int arrivals(int all)
{
    int done = 0, kept = 0;
    for (int i = 0; i < M.copy_count; i++) {
        if (M.copies[i].live && (all || draw() % 4 == 0))
            finish(M.copies + i), done++;
        if (M.copies[i].live)
            M.copies[kept++] = M.copies[i];
    }
    M.copy_count = kept;
    return done;
}

/* --------------------------------------------------------------------------------- products */

/* Reads one operand of a product from shared memory.
 *
 * to: [k][count], count rows of the side from `first` on
 * extra: 0 element kind (0 f16, 1 bf16, 2 tf32), across: the side is contiguous, not k
 */
static void read_operand(block *b, uint64_t d, int kind, int across, int first, int count, int ks,
                         float *to)
{
    uint32_t start = (d & 0x3fff) << 4, lead = (d >> 16 & 0x3fff) << 4;
    uint32_t stride = (d >> 32 & 0x3fff) << 4, layout = d >> 62;
    uint32_t element = kind == 2 ? 4 : 2, line = layout ? 256u >> layout : 16;
    uint32_t swizzle = layout ? 4 - layout : 0; /* 1: 128 bytes, 2: 64, 3: 32 */
    if (d >> 49 & 7)
        fail("a matrix descriptor with a base offset");
    /* by 16 bytes, which no swizzle tears apart: along k, or across */
    int per = 16 / (int)element, ns = across ? per : 1, kstep = across ? 1 : per;
    for (int n = 0; n < count; n += ns)
        for (int k = 0; k < ks; k += kstep) {
            uint32_t side = first + n, at, wide = line / element;
            if (!across)
                at = start + side / 8 * stride + side % 8 * line
                     + (layout ? k * element : k * element / 16 * lead);
            else if (layout)
                at = start + side / wide * lead + side % wide * element + k / 8 * stride
                     + k % 8 * line;
            else
                at = start + side / 8 * stride + k / 8 * lead + k % 8 * 16;
            at = swizzled(at, swizzle);
            uint8_t *p = shared_at(b, at, 16);
            proxy(b, at, 16, 0);
            for (int j = 0; j < per; j++) {
                uint32_t bits = 0;
                memcpy(&bits, p + j * element, element);
                to[across ? k * count + n + j : (k + j) * count + n] =
                    kind == 2 ? as_f32(bits & 0xffffe000u) : from16(kind, bits);
            }
        }
}

/* A step of 8 products of TF32 numbers, which are exact: their sum with the accumulator, rounded
 * toward zero. Measured of WGMMA; tcgen05 is taken to do the same. */
static float cut_off(const float *a, uint32_t rows, const float *b, int columns, float sign,
                     float before)
{
    double sum = before;
    for (uint32_t k = 0; k < 8; k++)
        sum += (double)(a[k * rows] * sign) * b[(int)k * columns];
    float found = (float)sum;
    if (fabs((double)found) > fabs(sum) && isfinite(found))
        found = nextafterf(found, 0);
    return found;
}

/* extra: 0 columns, 1 kind of the elements, 2 sources (1: A in registers), 3 transposes, 4 signs */
static void run_product(product *q)
{
    const instruction *i = q->i;
    int columns = i->extra[0], kind = i->extra[1], ks = kind == 2 ? 8 : 16;
    int in_registers = i->extra[2], fragments = columns / 2, index = (int)(q->w - q->b->warps);
    const int32_t *o = M.p->operands + i->first;
    uint64_t *r = q->w->r;
    static __thread float a[16 * 16], bs[16 * 256];
    M.b = q->b, M.now = i, M.now_warp = index;
    if (in_registers)
        for (int lane = 0; lane < LANES; lane++)
            for (int j = 0; j < 4; j++) {
                uint32_t bits = (uint32_t)r[(uint64_t)o[fragments + j] * LANES + lane];
                int row = lane / 4 + j % 2 * 8;
                if (kind == 2)
                    a[(lane % 4 + j / 2 * 4) * 16 + row] = as_f32(bits & 0xffffe000u);
                else
                    for (int h = 0; h < 2; h++)
                        a[(lane % 4 * 2 + j / 2 * 8 + h) * 16 + row] = from16(kind, bits >> 16 * h);
            }
    else
        read_operand(q->b, q->a, kind, i->extra[3] & 1, index % 4 * 16, 16, ks, a);
    read_operand(q->b, q->bd, kind, i->extra[3] >> 1, 0, columns, ks, bs);
    float sign = i->extra[4] ? -1 : 1;
    for (int row = 0; row < 16; row++) {
        float sum[256] = { 0 };
        for (int k = 0; k < ks && kind != 2; k++) {
            float x = a[k * 16 + row] * sign;
            for (int n = 0; n < columns; n++)
                sum[n] += x * bs[k * columns + n];
        }
        for (int n = 0; n < columns; n++) {
            int lane = row % 8 * 4 + n % 8 / 2, j = n / 8 * 4 + row / 8 * 2 + n % 2;
            uint64_t *d = r + (uint64_t)o[j] * LANES + lane;
            float before = q->scale ? as_f32((uint32_t)*d) : 0.0f;
            if (kind == 2)
                sum[n] = cut_off(a + row, 16, bs + n, columns, sign, before);
            else
                sum[n] += before;
            *d = of_f32(sum[n]);
        }
    }
}

/* Runs the products of a warp that belong to groups up to `group`. */
static void run_products(warp *w, int group)
{
    const instruction *now = M.now;
    block *b = M.b;
    int warp_now = M.now_warp, kept = 0;
    for (int i = 0; i < M.product_count; i++)
        if (M.products[i].w == w && M.products[i].group <= group)
            run_product(M.products + i);
        else
            M.products[kept++] = M.products[i];
    M.product_count = kept;
    M.now = now, M.b = b, M.now_warp = warp_now;
}

/* ----------------------------------------------------------------------------- tensor memory */

static column *columns_at(block *b, uint32_t eighth, uint32_t first, uint32_t count)
{
    column *c = b->tensor ? b->columns + eighth * COLUMNS + first : NULL;
    if (!c || first + count > COLUMNS)
        fail("columns %u to %u of tensor memory", first, first + count - 1);
    for (uint32_t n = 0; n < count; n++)
        if (!c[n].taken)
            fail("column %u of tensor memory, which is not allocated", first + n);
    return c;
}

/* The other block of a pair. */
static block *other(block *b)
{
    if ((b->rank ^ 1) >= (uint32_t)b->cluster->count)
        fail("an instruction of two blocks in a cluster of %d", b->cluster->count);
    block *there = b->cluster->blocks + (b->rank ^ 1);
    if (!there->alive_warps)
        fail("an instruction of two blocks, one of which has ended");
    return there;
}

/* An instruction that a warp of each block of a pair runs: returns 0 until both have come. */
static int both_call(block *b, warp *w)
{
    if (!w->called)
        w->called = ++b->calls, M.changes++;
    if ((b->cluster->blocks + (b->rank ^ 1))->calls < w->called)
        return 0;
    w->called = 0;
    return 1;
}

static int free_columns(block *b, uint32_t first, uint32_t count)
{
    if (!b->tensor) {
        b->tensor = malloc(ROWS * COLUMNS * 4);
        memset(b->tensor, 0xff, ROWS * COLUMNS * 4);
        b->columns = calloc(EIGHTHS * COLUMNS, sizeof *b->columns);
    }
    for (uint32_t k = 0; k < count; k++)
        if (b->columns[first + k].taken)
            return 0;
    return 1;
}

/* Columns of a block; of a `pair`, the same of both blocks. */
static void take_columns(block *b, uint32_t to, uint32_t count, block *pair)
{
    if (count < 32 || count > COLUMNS || count & (count - 1))
        fail("%u columns of tensor memory", count);
    uint32_t places = COLUMNS / count, from = draw();
    for (uint32_t n = 0; n < places; n++) {
        uint32_t first = b->offered ? (uint32_t)b->offered - 1 : (from + n) % places * count;
        if (!free_columns(b, first, count) || (pair && !b->offered && !free_columns(pair, first, count)))
            continue;
        if (pair && !b->offered)
            pair->offered = (int32_t)first + 1;
        b->offered = 0;
        for (uint32_t k = 0; k < count; k++)
            for (int e = 0; e < EIGHTHS; e++)
                b->columns[e * COLUMNS + first + k] = (column) { .taken = 1 };
        memcpy(shared_at(b, to, 4), &first, 4);
        return;
    }
    fail("no %u columns of tensor memory are left", count);
}

static int queued_for(block *b)
{
    int found = 0;
    for (int n = 0; n < M.queued; n++)
        found += M.queue[n].b == b || (M.queue[n].i->extra[3] && other(M.queue[n].b) == b);
    return found;
}

static void give_columns(block *b, uint32_t first, uint32_t count)
{
    if (queued_for(b))
        fail("tensor memory is given back before its products are done");
    columns_at(b, 0, first, count);
    for (uint32_t k = 0; k < count; k++)
        for (int e = 0; e < EIGHTHS; e++)
            b->columns[e * COLUMNS + first + k].taken = 0;
}

/* The accesses of a warp are before its next barrier for others. */
static void publish_columns(block *b, int32_t own)
{
    if (b->warps[own].transfer_count)
        fail("accesses to tensor memory that nobody has waited for");
    for (int n = 0; b->tensor && n < EIGHTHS * COLUMNS; n++)
        if (b->columns[n].touched && b->columns[n].toucher == own && !b->columns[n].published)
            b->columns[n].published = M.clock;
}

/* A product of a warp takes columns over from those that accessed them. */
static void hand_over(block *b, warp *w, uint32_t first, uint32_t count)
{
    for (int e = 0; e < EIGHTHS; e++) {
        column *c = columns_at(b, e, first, count);
        for (uint32_t n = 0; n < count; n++) {
            if (c[n].touched && (!c[n].published || w->after < c[n].published))
                fail("a product takes column %u of tensor memory, which warp %d accessed without "
                     "a tcgen05.fence on both sides of the barrier between them",
                     first + n, c[n].toucher);
            c[n].touched = 0;
        }
    }
}

/* extra: 0 bits of a row, 1 repetitions, 2 a store: thread t has rows t / 4 and t / 4 + 8 of 16 */
static void transfer(block *b, warp *w, const instruction *i, uint32_t address)
{
    int own = (int)(w - b->warps), bits = i->extra[0], count = i->extra[1] * bits / 64;
    uint32_t lane = address >> 16, first = address & 0xffff;
    const int32_t *o = M.p->operands + i->first + (i->extra[2] ? 2 : 0);
    if (lane / 32 != (uint32_t)own % 4 || lane % 16)
        fail("lane %u of tensor memory, which warp %d does not reach", lane, own);
    column *c = columns_at(b, lane / 16, first, (uint32_t)(i->extra[1] * bits / 32));
    for (int n = 0; n < i->extra[1] * bits / 32; n++) {
        if (w->after <= c[n].done && c[n].done)
            fail("column %u of tensor memory without a tcgen05.fence::after_thread_sync since its "
                 "product was done", first + n);
        c[n].touched = M.clock, c[n].toucher = own, c[n].published = 0;
    }
    for (int j = 0; j < count; j++)
        for (int l = 0; l < LANES; l++) {
            int row = l / 4 + 8 * (bits == 256 ? j / 2 % 2 : j % 2);
            int at = bits == 256 ? j / 4 * 8 + l % 4 * 2 + j % 2 : j / 2 * 4 + l % 4;
            uint32_t *cell = b->tensor + (lane + row) * COLUMNS + first + at;
            uint64_t *held = w->r + (uint64_t)o[j] * LANES + l;
            if (i->extra[2])
                *cell = (uint32_t)*held;
            else
                *held = *cell;
        }
}

/* Loads and stores are done when a warp has waited for them; registers hold NaN until then. */
static void start_transfer(block *b, warp *w, const instruction *i, uint32_t address)
{
    if (!M.l->late) {
        transfer(b, w, i, address);
        return;
    }
    if (w->transfer_count == TRANSFERS)
        fail("too many accesses to tensor memory under way");
    if (!i->extra[2])
        for (int j = 0; j < i->extra[1] * i->extra[0] / 64; j++)
            memset(w->r + (uint64_t)M.p->operands[i->first + j] * LANES, 0xff, LANES * 8);
    w->transfers[w->transfer_count].i = i;
    w->transfers[w->transfer_count++].address = address;
}

static void finish_transfers(block *b, warp *w, int stores)
{
    int kept = 0;
    for (int n = 0; n < w->transfer_count; n++)
        if (w->transfers[n].i->extra[2] == stores)
            transfer(b, w, w->transfers[n].i, w->transfers[n].address);
        else
            w->transfers[kept++] = w->transfers[n];
    w->transfer_count = kept;
}

/* The instruction descriptor: rows and columns, elements, transposes. */
static uint32_t rows_of(uint32_t shape) { return (shape >> 24 & 31) * 16; }
static uint32_t columns_of(uint32_t shape) { return (shape >> 17 & 63) * 8; }

/* The lane of a row: 64 rows lie in the lower half of each quarter. */
static uint32_t lane_of(uint32_t row, uint32_t rows)
{
    return rows == 64 ? row / 16 * 32 + row % 16 : row;
}

/* The rows that a block has of a product, `bs` being all columns. */
static void multiply_rows(block *b, issued *q, uint32_t rows, const float *bs)
{
    uint32_t count = columns_of(q->shape);
    int kind = q->shape >> 7 & 7, ks = kind == 2 ? 8 : 16;
    static __thread float a[16 * ROWS];
    if (q->i->extra[1])
        for (uint32_t row = 0; row < rows; row++)
            for (int k = 0; k < ks; k++) {
                uint32_t *words = b->tensor + lane_of(row, rows) * COLUMNS + (uint32_t)q->a;
                a[k * rows + row] = kind == 2 ? as_f32(words[k] & 0xffffe000u)
                                              : from16(kind, (uint16_t)(words[k / 2] >> 16 * (k % 2)));
            }
    else
        read_operand(b, q->a, kind, q->shape >> 15 & 1, 0, (int)rows, ks, a);
    for (uint32_t row = 0; row < rows; row++) {
        float sum[256] = { 0 };
        uint32_t *d = b->tensor + lane_of(row, rows) * COLUMNS + q->d;
        for (int k = 0; k < ks && kind != 2; k++)
            for (uint32_t n = 0; n < count; n++)
                sum[n] += a[k * rows + row] * bs[k * count + n];
        for (uint32_t n = 0; n < count; n++) {
            float before = q->adds ? as_f32(d[n]) : 0.0f;
            d[n] = of_f32(kind == 2 ? cut_off(a + row, rows, bs + n, (int)count, 1, before)
                                    : sum[n] + before);
        }
    }
    for (int eighth = 0; eighth < EIGHTHS; eighth++)
        for (uint32_t n = 0; n < count; n++)
            b->columns[eighth * COLUMNS + q->d + n].done = M.clock;
}

/* extra: 0 a commit, 1 A in tensor memory, 2 elements of TF32, 3 of two blocks */
static void run_issued(issued *q)
{
    M.b = q->b, M.now = q->i, M.now_warp = (int)(q->w - q->b->warps);
    block *blocks[2] = { q->b, q->i->extra[3] ? other(q->b) : NULL };
    if (q->i->extra[0]) {
        for (int n = 0; n < q->b->cluster->count; n++)
            if (q->ranks >> n & 1)
                barrier_arrive(shared_at(q->b->cluster->blocks + n, q->barrier, 8), 1, 0);
        return;
    }
    int parts = 1 + q->i->extra[3], kind = q->shape >> 7 & 7, ks = kind == 2 ? 8 : 16;
    uint32_t count = columns_of(q->shape), part = count / (uint32_t)parts;
    static __thread float own[16 * 256], bs[16 * 256];
    for (int n = 0; n < parts; n++) {
        read_operand(blocks[n], q->bd, kind, q->shape >> 16 & 1, 0, (int)part, ks, own);
        for (int k = 0; k < ks; k++)
            memcpy(bs + (uint32_t)k * count + (uint32_t)n * part, own + (uint32_t)k * part, part * 4);
    }
    for (int n = 0; n < parts; n++)
        multiply_rows(blocks[n], q, rows_of(q->shape) / (uint32_t)parts, bs);
}

static void issue(issued q)
{
    int two = q.i->extra[3];
    if (two && q.b->rank % 2)
        fail("an instruction of two blocks that the second of them issues");
    if (!q.i->extra[0]) {
        uint32_t rows = rows_of(q.shape), count = columns_of(q.shape);
        if ((two ? rows != 256 : rows != 64 && rows != 128) || count == 0 || count > 256
            || (q.shape >> 4 & 3) != 1
            || (q.i->extra[2] ? (q.shape >> 7 & 7) != 2 : (q.shape >> 7 & 7) > 1)
            || (q.shape >> 10 & 7) != (q.shape >> 7 & 7)
            || (rows == 128 && count % 16) || (two && count % 32))
            fail("a product of shape %#x", q.shape);
        for (int n = 0; n <= two; n++) {
            block *there = n ? other(q.b) : q.b;
            hand_over(there, q.w, q.d, count);
            if (q.i->extra[1])
                hand_over(there, q.w, (uint32_t)q.a, 8);
        }
    }
    if (!M.l->late)
        run_issued(&q);
    else if (M.queued == PRODUCTS)
        fail("too many products under way");
    else
        M.queue[M.queued++] = q;
}

/* Lets the tensor cores go on, as far as the next arrival; returns 0 if there is nothing to do. */
static int run_queue(void)
{
    int done = 0;
    while (done < M.queued) {
        run_issued(M.queue + done++);
        if (M.queue[done - 1].i->extra[0])
            break;
    }
    memmove(M.queue, M.queue + done, (M.queued - done) * sizeof *M.queue);
    M.queued -= done, M.now = NULL;
    return done;
}

/* ------------------------------------------------------------------------------ instructions */

/* Element-wise operations: name, type of the operands, type of the result, value. The names have no
 * rounding mode and no .ftz; see `decode` in run.py. */
#define U8 uint8_t
#define U16 uint16_t
#define S16 int16_t
#define U32 uint32_t
#define S32 int32_t
#define U64 uint64_t
#define S64 int64_t
#define INTEGERS(X)                                                                                \
    X("add.16", U16, (U16)(a + b)) X("add.32", U32, a + b) X("add.64", U64, a + b)                 \
    X("sub.16", U16, (U16)(a - b)) X("sub.32", U32, a - b) X("sub.64", U64, a - b)                 \
    X("mul.lo.16", U16, (U16)((U32)a * b)) X("mul.lo.32", U32, a * b) X("mul.lo.64", U64, a * b)   \
    X("mul.hi.s32", S32, (S32)((S64)a * b >> 32)) X("mul.hi.u32", U32, (U32)((U64)a * b >> 32))    \
    X("mul.hi.u16", U16, (U16)((U32)a * b >> 16)) X("mul.hi.s16", S16, (S16)((S32)a * b >> 16))    \
    X("mul.hi.u64", U64, (U64)((unsigned __int128)a * b >> 64))                                    \
    X("mul.hi.s64", S64, (S64)((__int128)a * b >> 64))                                             \
    X("mad.lo.32", U32, a * b + c) X("mad.lo.64", U64, a * b + c)                                  \
    X("mad.lo.16", U16, (U16)((U32)a * b + c))                                                     \
    X("div.u16", U16, b ? a / b : 0xffff) X("rem.u16", U16, b ? a % b : a)                         \
    X("div.s16", S16, b ? (S16)(a / b) : -1) X("rem.s16", S16, b ? (S16)(a % b) : a)               \
    X("min.u16", U16, a < b ? a : b) X("max.u16", U16, a > b ? a : b)                              \
    X("mad.hi.s32", S32, (S32)((S64)a * b >> 32) + c)                                              \
    X("mad.hi.u32", U32, (U32)((U64)a * b >> 32) + c)                                              \
    X("div.s32", S32, b ? (S32)((S64)a / b) : -1) X("div.u32", U32, b ? a / b : FULL)              \
    X("div.s64", S64, b ? a / b : -1) X("div.u64", U64, b ? a / b : ~0ull)                         \
    X("rem.s32", S32, b ? (S32)((S64)a % b) : a) X("rem.u32", U32, b ? a % b : a)                  \
    X("rem.s64", S64, b ? a % b : a) X("rem.u64", U64, b ? a % b : a)                              \
    X("min.s32", S32, a < b ? a : b) X("max.s32", S32, a > b ? a : b)                              \
    X("min.relu.s32", S32, a < 0 || b < 0 ? 0 : a < b ? a : b)                                     \
    X("max.relu.s32", S32, a < 0 && b < 0 ? 0 : a > b ? a : b)                                     \
    X("min.u32", U32, a < b ? a : b) X("max.u32", U32, a > b ? a : b)                              \
    X("min.s64", S64, a < b ? a : b) X("max.s64", S64, a > b ? a : b)                              \
    X("min.u64", U64, a < b ? a : b) X("max.u64", U64, a > b ? a : b)                              \
    X("min.s16", S16, a < b ? a : b) X("max.s16", S16, a > b ? a : b)                              \
    X("neg.s32", U32, -a) X("neg.s64", U64, -a) X("neg.s16", U16, (U16)-a)                         \
    X("abs.s32", S32, a < 0 ? (S32)-(U32)a : a) X("abs.s64", S64, a < 0 ? -a : a)                  \
    X("and.b16", U16, a & b) X("and.b32", U32, a & b) X("and.b64", U64, a & b)                     \
    X("or.b16", U16, a | b) X("or.b32", U32, a | b) X("or.b64", U64, a | b)                        \
    X("xor.b16", U16, a ^ b) X("xor.b32", U32, a ^ b) X("xor.b64", U64, a ^ b)                     \
    X("and.pred", U64, a & b) X("or.pred", U64, a | b) X("xor.pred", U64, a ^ b)                   \
    X("not.pred", U64, !a) X("not.b32", U32, ~a) X("not.b64", U64, ~a) X("not.b16", U16, (U16)~a)  \
    X("shl.b16", U16, (U32)b > 15 ? 0 : (U16)(a << b))                                             \
    X("shl.b32", U32, b > 31 ? 0 : a << b)                                                         \
    X("shl.b64", U64, (U32)b > 63 ? 0 : a << (U32)b)                                               \
    X("shr.u16", U16, b > 15 ? 0 : a >> b) X("shr.s16", S16, a >> ((U16)b > 15 ? 15 : b))          \
    X("shr.u32", U32, b > 31 ? 0 : a >> b) X("shr.s32", S32, a >> ((U32)b > 31 ? 31 : b))          \
    X("shr.u64", U64, (U32)b > 63 ? 0 : a >> (U32)b)                                               \
    X("shr.s64", S64, a >> ((U32)b > 63 ? 63 : (U32)b))                                            \
    X("bfe.u32", U32, extract(a, b, c, 0)) X("bfe.s32", U32, extract(a, b, c, 1))                  \
    X("bfi.b32", U32, insert(a, b, c, d)) X("prmt.b32", U32, permute(a, b, c))                     \
    X("popc.b32", U32, (U32)__builtin_popcount(a)) X("clz.b32", U32, a ? __builtin_clz(a) : 32)    \
    X("brev.b32", U32, reversed(a)) X("lop3.b32", U32, lookup3(a, b, c, d))                        \
    X("shf.l.clamp.b32", U32, funnel(a, b, c > 32 ? 32 : c, 1))                                    \
    X("shf.r.clamp.b32", U32, funnel(a, b, c > 32 ? 32 : c, 0))                                    \
    X("shf.l.wrap.b32", U32, funnel(a, b, c & 31, 1))                                              \
    X("shf.r.wrap.b32", U32, funnel(a, b, c & 31, 0))                                              \
    X("dp4a.u32.u32", U32, dot(a, b, c, 4, 0)) X("dp2a.lo.u32.u32", U32, dot(a, b, c, 2, 0))       \
    X("dp2a.hi.u32.u32", U32, dot(a, b, c, 2, 2))                                                  \
    X("selp.16", U16, c & 1 ? a : b) X("selp.32", U32, c & 1 ? a : b)                              \
    X("selp.64", U64, c & 1 ? a : b)                                                               \
    X("mov.16", U16, a) X("mov.32", U32, a) X("mov.64", U64, a) X("mov.pred", U64, a & 1)          \
    X("add.f16x2", U32, add2(0, a, b, c)) X("add.bf16x2", U32, add2(1, a, b, c))                   \
    X("sub.f16x2", U32, sub2(0, a, b, c)) X("sub.bf16x2", U32, sub2(1, a, b, c))                   \
    X("mul.f16x2", U32, mul2(0, a, b, c)) X("mul.bf16x2", U32, mul2(1, a, b, c))                   \
    X("fma.f16x2", U32, fma2(0, a, b, c)) X("fma.bf16x2", U32, fma2(1, a, b, c))                   \
    X("max.f16x2", U32, max2(0, a, b, c)) X("max.bf16x2", U32, max2(1, a, b, c))                   \
    X("min.f16x2", U32, min2(0, a, b, c)) X("min.bf16x2", U32, min2(1, a, b, c))                   \
    X("max.NaN.f16x2", U32, maxn2(0, a, b, c)) X("max.NaN.bf16x2", U32, maxn2(1, a, b, c))         \
    X("min.NaN.f16x2", U32, minn2(0, a, b, c)) X("min.NaN.bf16x2", U32, minn2(1, a, b, c))         \
    X("max.NaN.f16", U16, to16(0, max_nan(from16(0, a), from16(0, b))))                            \
    X("max.NaN.bf16", U16, to16(1, max_nan(from16(1, a), from16(1, b))))                           \
    X("min.NaN.f16", U16, to16(0, min_nan(from16(0, a), from16(0, b))))                            \
    X("min.NaN.bf16", U16, to16(1, min_nan(from16(1, a), from16(1, b))))                           \
    X("max.f16", U16, to16(0, fmaxf(from16(0, a), from16(0, b))))                                  \
    X("max.bf16", U16, to16(1, fmaxf(from16(1, a), from16(1, b))))                                 \
    X("min.f16", U16, to16(0, fminf(from16(0, a), from16(0, b))))                                  \
    X("min.bf16", U16, to16(1, fminf(from16(1, a), from16(1, b))))                                 \
    X("add.f16", U16, to16(0, from16(0, a) + from16(0, b)))                                        \
    X("add.bf16", U16, to16(1, from16(1, a) + from16(1, b)))                                       \
    X("sub.f16", U16, to16(0, from16(0, a) - from16(0, b)))                                        \
    X("sub.bf16", U16, to16(1, from16(1, a) - from16(1, b)))                                       \
    X("mul.f16", U16, to16(0, from16(0, a) * from16(0, b)))                                        \
    X("mul.bf16", U16, to16(1, from16(1, a) * from16(1, b)))                                       \
    X("fma.f16", U16, to16(0, (float)((double)from16(0, a) * from16(0, b) + from16(0, c))))        \
    X("fma.bf16", U16, to16(1, (float)((double)from16(1, a) * from16(1, b) + from16(1, c))))       \
    X("neg.bf16", U16, a ^ 0x8000) X("neg.f16", U16, a ^ 0x8000)                                   \
    X("neg.bf16x2", U32, a ^ 0x80008000u) X("neg.f16x2", U32, a ^ 0x80008000u)                     \
    X("abs.bf16", U16, a & 0x7fff) X("abs.f16", U16, a & 0x7fff)                                   \
    X("abs.bf16x2", U32, a & 0x7fff7fffu) X("abs.f16x2", U32, a & 0x7fff7fffu)                     \
    X("cvt.f32.f16", U16, of_f32(f16_to_f32(a))) X("cvt.f32.bf16", U16, of_f32(bf16_to_f32(a)))    \
    X("cvt.f16.f32", U32, f32_to_f16(as_f32(a))) X("cvt.bf16.f32", U32, f32_to_bf16(as_f32(a)))    \
    X("cvt.f16x2.f32", U32, (U32)f32_to_f16(as_f32(a)) << 16 | f32_to_f16(as_f32(b)))              \
    X("cvt.bf16x2.f32", U32, (U32)f32_to_bf16(as_f32(a)) << 16 | f32_to_bf16(as_f32(b)))           \
    X("cvt.tf32.f32", U32, (a + 0x1000) & 0xffffe000u)                                             \
    X("cvt.f32.s32", S32, of_f32((float)a)) X("cvt.f32.u32", U32, of_f32((float)a))                \
    X("cvt.f32.s64", S64, of_f32((float)a)) X("cvt.f32.u64", U64, of_f32((float)a))                \
    X("cvt.f32.s16", S16, of_f32((float)a)) X("cvt.f32.u16", U16, of_f32((float)a))                \
    X("cvt.f16.s32", S32, f32_to_f16((float)a)) X("cvt.f16.u32", U32, f32_to_f16((float)a))        \
    X("cvt.f16.s64", S64, f32_to_f16((float)a)) X("cvt.f16.u64", U64, f32_to_f16((float)a))        \
    X("cvt.f16.s16", S16, f32_to_f16((float)a)) X("cvt.f16.u16", U16, f32_to_f16((float)a))        \
    X("cvt.bf16.s32", S32, integer_to_bf16(a)) X("cvt.bf16.u32", U32, integer_to_bf16(a))          \
    X("cvt.bf16.s64", S64, integer_to_bf16(a)) X("cvt.bf16.u64", U64, integer_to_bf16(a))          \
    X("cvt.bf16.s16", S16, integer_to_bf16(a)) X("cvt.bf16.u16", U16, integer_to_bf16(a))          \
    X("cvt.f32.s8", U16, of_f32((float)(int8_t)a)) X("cvt.f32.u8", U16, of_f32((float)(a & 255)))  \
    X("cvt.rzi.s32.f32", U32, (U32)to_int(truncf(as_f32(a)), -0x1p31, 0x1p31 - 1))                 \
    X("cvt.rni.s32.f32", U32, (U32)to_int(rintf(as_f32(a)), -0x1p31, 0x1p31 - 1))                  \
    X("cvt.rmi.s32.f32", U32, (U32)to_int(floorf(as_f32(a)), -0x1p31, 0x1p31 - 1))                 \
    X("cvt.rzi.u32.f32", U32, (U32)to_int(truncf(as_f32(a)), 0, 0x1p32 - 1))                       \
    X("cvt.rni.u32.f32", U32, (U32)to_int(rintf(as_f32(a)), 0, 0x1p32 - 1))                        \
    X("cvt.rzi.s64.f32", U32, (U64)to_int(truncf(as_f32(a)), -0x1p63, 0x1p63 - 1024))              \
    X("cvt.f32.f32", U32, a)                                                                       \
    X("cvt.sat.f32.f32", U32, of_f32(isnan(as_f32(a)) ? 0 : fminf(fmaxf(as_f32(a), 0), 1)))        \
    X("cvt.rni.f32.f32", U32, of_f32(rintf(as_f32(a))))                                            \
    X("cvt.rmi.f32.f32", U32, of_f32(floorf(as_f32(a))))                                           \
    X("cvt.rpi.f32.f32", U32, of_f32(ceilf(as_f32(a))))                                            \
    X("cvt.rzi.f32.f32", U32, of_f32(truncf(as_f32(a))))                                           \
    X("cvt.f64.f32", U32, of_f64(as_f32(a))) X("cvt.f32.f64", U64, of_f32((float)as_f64(a)))       \
    X("cvt.f64.s64", S64, of_f64((double)a)) X("cvt.f64.s32", S32, of_f64((double)a))              \
    X("add.f64", U64, of_f64(as_f64(a) + as_f64(b)))                                               \
    X("mul.f64", U64, of_f64(as_f64(a) * as_f64(b)))                                               \
    X("fma.f64", U64, of_f64(fma(as_f64(a), as_f64(b), as_f64(c))))                                \
    X("cvta.param.u64", U64, a + (U64)(uintptr_t)M.l->parameters)                                  \
    X("cvta.global.u64", U64, a) X("cvta.to.global.u64", U64, a)                    \
    X("cvta.shared.u64", U64, a) X("cvta.to.shared::cluster.u64", U64, a)

#define WIDE(X)                                                                                    \
    X("mul.wide.s32", S32, (U64)((S64)a * b), a) X("mul.wide.u32", U32, (U64)a * b, a)             \
    X("mul.wide.s16", S16, (U64)(U32)((S32)a * b), a) X("mul.wide.u16", U16, (U64)((U32)a * b), a) \
    X("mad.wide.s32", S32, (U64)((S64)a * b) + c64, c) X("mad.wide.u32", U32, (U64)a * b + c64, c) \
    X("add.f32x2", U64, pair(a, b, 1, 0), c) X("mul.f32x2", U64, pair(a, b, 2, 0), c)              \
    X("sub.f32x2", U64, pair(a, b, 3, 0), c) X("fma.f32x2", U64, pair(a, b, 0, c64), c)            \
    X("fma.f32.f16", U32, mixed(0, a, b, as_f32((U32)c64)), c)                                     \
    X("fma.f32.bf16", U32, mixed(1, a, b, as_f32((U32)c64)), c)                                    \
    X("add.f32.f16", U32, mixed(0, a, ONE_F16, as_f32(b)), c)                                      \
    X("add.f32.bf16", U32, mixed(1, a, ONE_BF16, as_f32(b)), c)                                    \
    X("sub.f32.f16", U32, mixed(0, a, ONE_F16, -as_f32(b)), c)                                     \
    X("sub.f32.bf16", U32, mixed(1, a, ONE_BF16, -as_f32(b)), c)

#define FLOATS(X)                                                                                  \
    X("add.f32", a + b) X("sub.f32", a - b) X("mul.f32", a * b) X("fma.f32", fmaf(a, b, c))        \
    X("fma.rm.f32", rounded(fma((double)a, b, c), fmaf(a, b, c), 0))                               \
    X("fma.rp.f32", rounded(fma((double)a, b, c), fmaf(a, b, c), 1))                               \
    X("add.rm.f32", rounded((double)a + b, a + b, 0))                                              \
    X("add.rp.f32", rounded((double)a + b, a + b, 1))                                              \
    X("fma.rz.f32", rounded(fma((double)a, b, c), fmaf(a, b, c), fma((double)a, b, c) < 0))        \
    X("add.rz.f32", rounded((double)a + b, a + b, (double)a + b < 0))                              \
    X("mul.rz.f32", rounded((double)a * b, a * b, (double)a * b < 0))                              \
    X("fma.sat.f32", fminf(fmaxf(fmaf(a, b, c), 0), 1))                                            \
    X("add.sat.f32", fminf(fmaxf(a + b, 0), 1)) X("mul.sat.f32", fminf(fmaxf(a * b, 0), 1))        \
    X("div.f32", a / b) X("rcp.f32", 1 / a) X("sqrt.f32", sqrtf(a)) X("rsqrt.f32", 1 / sqrtf(a))   \
    X("ex2.f32", exp2f(a)) X("lg2.f32", log2f(a)) X("tanh.f32", coarse(tanhf(a)))                  \
    X("sin.f32", sinf(a)) X("cos.f32", cosf(a)) X("neg.f32", -a) X("abs.f32", fabsf(a))            \
    X("min.f32", fminf(a, b)) X("max.f32", fmaxf(a, b)) X("min.NaN.f32", min_nan(a, b))            \
    X("max.NaN.f32", max_nan(a, b)) X("copysign.f32", copysignf(b, a))

#define COMPARISONS(X)                                                                             \
    X("eq", a == b) X("ne", a != b) X("lt", a < b) X("le", a <= b) X("gt", a > b) X("ge", a >= b)

enum {
    OTHER_OPS = 1000, /* operations that are not element-wise */
    INTEGER_OPS = 2000, WIDE_OPS = 3000, FLOAT_OPS = 4000, COMPARE_OPS = 5000,
};

#define NAME_INTEGER(name, T, value) name,
#define NAME_WIDE(name, T, value, use) name,
#define NAME_FLOAT(name, value) name,
static const char *integer_names[] = { INTEGERS(NAME_INTEGER) NULL };
static const char *wide_names[] = { WIDE(NAME_WIDE) NULL };
static const char *float_names[] = { FLOATS(NAME_FLOAT) NULL };
static const char *other_names[] = {
    "bra", "ret", "ld", "st", "unpack", "pack", "setp", "shfl", "elect", "vote", "bar.sync",
    "bar.arrive", "bar.warp", "barrier.cluster.arrive", "barrier.cluster.wait", "mbarrier.init",
    "mbarrier.arrive", "mbarrier.expect", "mbarrier.arrive.expect", "mbarrier.try_wait", "mapa",
    "st.async", "copy.tensor", "copy.linear", "wgmma", "wgmma.commit", "wgmma.wait", "fence.proxy",
    "nothing", "atom", "copy.out", "redux", "copy.async", "trap", "match", "stmatrix", "ldmatrix",
    "tensor.out", "out.commit", "out.wait", "convert", "carried", "tensor.alloc", "tensor.free",
    "tensor.move", "tensor.wait", "tensor.issue", "tensor.before", "tensor.after", "hand.ask",
    "hand.found", "hand.block", NULL,
};
enum {
    BRA, RET, LD, ST, UNPACK, PACK, SETP, SHFL, ELECT, VOTE, BAR_SYNC, BAR_ARRIVE, BAR_WARP,
    CLUSTER_ARRIVE, CLUSTER_WAIT, MB_INIT, MB_ARRIVE, MB_EXPECT, MB_ARRIVE_EXPECT, MB_WAIT, MAPA,
    ST_ASYNC, COPY_TENSOR, COPY_LINEAR, WGMMA, WGMMA_COMMIT, WGMMA_WAIT, FENCE_PROXY, NOTHING, ATOM,
    COPY_OUT, REDUX, COPY_ASYNC, TRAP, MATCH, STMATRIX, LDMATRIX,
    TENSOR_OUT, OUT_COMMIT, OUT_WAIT, CONVERT, CARRIED, TENSOR_ALLOC, TENSOR_FREE,
    TENSOR_MOVE, TENSOR_WAIT, TENSOR_ISSUE, TENSOR_BEFORE, TENSOR_AFTER, HAND_ASK,
    HAND_FOUND, HAND_BLOCK,
};

int operation(const char *name)
{
    const char **tables[] = { other_names, integer_names, wide_names, float_names };
    int first[] = { OTHER_OPS, INTEGER_OPS, WIDE_OPS, FLOAT_OPS };
    for (int t = 0; t < 4; t++)
        for (int i = 0; tables[t][i]; i++)
            if (strcmp(tables[t][i], name) == 0)
                return first[t] + i;
    return -1;
}

static uint32_t reversed(uint32_t a)
{
    uint32_t r = 0;
    for (int i = 0; i < 32; i++)
        r |= (a >> i & 1) << (31 - i);
    return r;
}

#define EACH for (int l = 0; l < LANES; l++) if (mask >> l & 1)
#define R(n) r[(uint64_t)(n) * LANES + l]

static void integer_op(int op, uint64_t *r, const int32_t *o, int n, uint32_t mask)
{
    int ob = o[n > 2 ? 2 : 0], oc = o[n > 3 ? 3 : 0], od = o[n > 4 ? 4 : 0];
    enum { FIRST_INTEGER = __COUNTER__ + 1 };
#define CASE_INTEGER(name, T, value)                                                               \
    case __COUNTER__ - FIRST_INTEGER: {                                                            \
        EACH {                                                                                     \
            T a = (T)R(o[1]), b = (T)R(ob), c = (T)R(oc), d = (T)R(od);                            \
            (void)a, (void)b, (void)c, (void)d;                                                    \
            R(o[0]) = sizeof(T) == 8 ? (uint64_t)(value)                                           \
                      : name[0] == 'c' ? (uint64_t)(value) : (uint64_t)(T)(value) & WIDTH(T);      \
        }                                                                                          \
        return;                                                                                    \
    }
#define WIDTH(T) (sizeof(T) == 4 ? 0xffffffffull : sizeof(T) == 2 ? 0xffffull : ~0ull)
    switch (op) { INTEGERS(CASE_INTEGER) }
}

static void wide_op(int op, uint64_t *r, const int32_t *o, int n, uint32_t mask)
{
    int oc = o[n > 3 ? 3 : 0];
    enum { FIRST_WIDE = __COUNTER__ + 1 };
#define CASE_WIDE(name, T, value, use)                                                             \
    case __COUNTER__ - FIRST_WIDE: {                                                               \
        EACH {                                                                                     \
            T a = (T)R(o[1]), b = (T)R(o[2]), c = 0;                                               \
            uint64_t c64 = R(oc);                                                                  \
            (void)c, (void)c64;                                                                    \
            R(o[0]) = value;                                                                       \
        }                                                                                          \
        return;                                                                                    \
    }
    switch (op) { WIDE(CASE_WIDE) }
}

static void float_op(int op, uint64_t *r, const int32_t *o, int n, uint32_t mask, int ftz)
{
    int ob = o[n > 2 ? 2 : 0], oc = o[n > 3 ? 3 : 0];
    enum { FIRST_FLOAT = __COUNTER__ + 1 };
#define CASE_FLOAT(name, value)                                                                    \
    case __COUNTER__ - FIRST_FLOAT: {                                                              \
        EACH {                                                                                     \
            float a = as_f32((uint32_t)R(o[1])), b = as_f32((uint32_t)R(ob)),                      \
                  c = as_f32((uint32_t)R(oc));                                                     \
            (void)b, (void)c;                                                                      \
            if (ftz)                                                                               \
                a = flushed(a), b = flushed(b), c = flushed(c);                                    \
            float result = value;                                                                  \
            R(o[0]) = of_f32(ftz ? flushed(result) : result);                                      \
        }                                                                                          \
        return;                                                                                    \
    }
    switch (op) { FLOATS(CASE_FLOAT) }
}

/* extra: 0 comparison, 1 type, 2 how to join (0 none, 1 and, 2 or, 3 xor) */
static int compared(int how, int type, uint64_t x, uint64_t y)
{
    int unordered = how >= 8;
#define COMPARE_AS(T, ax, ay)                                                                      \
    {                                                                                              \
        T a = ax, b = ay;                                                                          \
        switch (how & 7) {                                                                         \
        case 0: return a == b;                                                                     \
        case 1: return a != b;                                                                     \
        case 2: return a < b;                                                                      \
        case 3: return a <= b;                                                                     \
        case 4: return a > b;                                                                      \
        default: return a >= b;                                                                    \
        }                                                                                          \
    }
    switch (type) {
    case 0: COMPARE_AS(uint32_t, (uint32_t)x, (uint32_t)y)
    case 1: COMPARE_AS(int32_t, (int32_t)x, (int32_t)y)
    case 2: COMPARE_AS(uint64_t, x, y)
    case 3: COMPARE_AS(int64_t, (int64_t)x, (int64_t)y)
    case 4: COMPARE_AS(uint16_t, (uint16_t)x, (uint16_t)y)
    case 5: COMPARE_AS(int16_t, (int16_t)x, (int16_t)y)
    }
    float f = type == 6 ? as_f32((uint32_t)x) : from16(type - 7, (uint16_t)x);
    float g = type == 6 ? as_f32((uint32_t)y) : from16(type - 7, (uint16_t)y);
    if (how == 6)
        return isnan(f) || isnan(g);
    if (how == 7)
        return !isnan(f) && !isnan(g);
    if (isnan(f) || isnan(g))
        return unordered;
    COMPARE_AS(float, f, g)
}

static uint8_t *memory_at(block *b, int space, uint64_t address, uint32_t bytes, int write)
{
    if (address % bytes)
        fail("address %#llx for %u bytes", (unsigned long long)address, bytes);
    if (space == 0) {
        if (write)
            fail("writes to a parameter");
        return M.l->parameters + address;
    }
    if (space == 1) {
        uint8_t *p = shared_at(b, (uint32_t)address, bytes);
        if (write)
            written(b, (uint32_t)address, bytes);
        return p;
    }
    return global_at(address, bytes, write);
}

/* Memory for one thread, which may be its own. */
static uint8_t *thread_memory_at(block *b, warp *w, int lane, int space, uint64_t address,
                                 uint32_t bytes, int write)
{
    if (space != 3)
        return memory_at(b, space, address, bytes, write);
    if (address % bytes || address + bytes > (uint64_t)M.p->local)
        fail("byte %lld of local memory, of which there are %d", (long long)address, M.p->local);
    return w->local + (uint64_t)lane * M.p->local + address;
}

static uint64_t atomic(int how, int type, uint64_t old, uint64_t x, uint64_t y)
{
    switch (how) {
    case 0: return type == 6 ? of_f32(as_f32((uint32_t)old) + as_f32((uint32_t)x)) : old + x;
    case 1: return x;                               /* exch */
    case 2: return old == x ? y : old;              /* cas */
    case 3: return old | x;
    case 4: return old & x;
    case 5: return compared(2, type, old, x) ? x : old; /* max */
    case 6: return compared(2, type, x, old) ? x : old; /* min */
    default: return (uint32_t)old >= (uint32_t)x ? 0 : old + 1; /* inc */
    }
}

/* Ends a phase of the cluster barrier when all warps that have not ended are there. */
static void cluster_check(cluster *c)
{
    int there = 0;
    for (int n = 0; n < c->count; n++)
        for (int j = 0; j < c->blocks[n].warp_count; j++) {
            warp *w = c->blocks[n].warps + j;
            there += w->cluster_phase == c->phase + 1;
            if (w->alive && w->cluster_phase != c->phase + 1)
                return;
        }
    c->phase += there != 0;
}

static int whole(warp *w, uint32_t mask, uint32_t group)
{
    return (mask & w->alive & ~group) == 0;
}

/* Runs one instruction for the threads of `group`, which stand at it. Returns 0 if the group has to
 * wait there; then nothing has happened. */
static int step(block *b, warp *w, uint32_t group)
{
    int pc = w->pc[__builtin_ctz(group)];
    const instruction *i = M.p->code + pc;
    const int32_t *o = M.p->operands + i->first;
    uint64_t *r = w->r;
    uint32_t mask = group;
    M.now = i, M.clock++;
    if (i->predicate >= 0) {
        mask = 0;
        for (int l = 0; l < LANES; l++)
            if (group >> l & 1 && (R(i->predicate >> 1) & 1) != (uint64_t)(i->predicate & 1))
                mask |= 1u << l;
    }
    if (i->op == OTHER_OPS + BRA) {
        for (int l = 0; l < LANES; l++)
            if (group >> l & 1)
                w->pc[l] = mask >> l & 1 ? i->target : pc + 1;
        return 1;
    }
    if (mask == 0)
        goto next;
    if (i->op >= FLOAT_OPS)
        float_op(i->op - FLOAT_OPS, r, o, i->count, mask, i->extra[0]);
    else if (i->op >= WIDE_OPS)
        wide_op(i->op - WIDE_OPS, r, o, i->count, mask);
    else if (i->op >= INTEGER_OPS)
        integer_op(i->op - INTEGER_OPS, r, o, i->count, mask);
    else
        switch (i->op - OTHER_OPS) {
        case RET:
            w->alive &= ~mask;
            break;
        case NOTHING:
            break;
        case TRAP:
            fail("a trap");
            break;
        case LD: { /* extra: 0 space, 1 bytes, 2 vector, 3 sign */
            int n = i->extra[2];
            EACH {
                uint64_t address = R(o[n]) + R(o[n + 1]);
                uint8_t *p = thread_memory_at(b, w, l, i->extra[0], address, i->extra[1], 0);
                if (n > 1 && address % (uint64_t)(n * i->extra[1]))
                    fail("misaligned vector at %#llx", (unsigned long long)address);
                for (int v = 0; v < n; v++) {
                    uint64_t value = 0;
                    if (v)
                        p = thread_memory_at(b, w, l, i->extra[0], address + v * i->extra[1],
                                             i->extra[1], 0);
                    memcpy(&value, p, i->extra[1]);
                    if (i->extra[3])
                        value = (uint64_t)((int64_t)(value << (64 - 8 * i->extra[1]))
                                           >> (64 - 8 * i->extra[1]));
                    R(o[v]) = value;
                }
            }
            break;
        }
        case ST: {
            int n = i->extra[2];
            EACH {
                uint64_t address = R(o[0]) + R(o[1]);
                if (n > 1 && address % (uint64_t)(n * i->extra[1]))
                    fail("misaligned vector at %#llx", (unsigned long long)address);
                for (int v = 0; v < n; v++) {
                    uint8_t *p = thread_memory_at(b, w, l, i->extra[0], address + v * i->extra[1],
                                                  i->extra[1], 1);
                    memcpy(p, &R(o[2 + v]), i->extra[1]);
                }
            }
            break;
        }
        case CONVERT: /* between integers; extra: bits and sign of the result, of the operand */
            EACH R(o[0]) = resized(resized(R(o[1]), i->extra[2], i->extra[3]), i->extra[0],
                                   i->extra[1]);
            break;
        case CARRIED: /* extra: 0 add, 1 mad.lo, 2 mad.hi; 1 bits, 2 takes a carry, 3 gives one */
            EACH {
                int bits = i->extra[1];
                unsigned __int128 x = resized(R(o[1]), bits, 0), y = resized(R(o[2]), bits, 0);
                if (i->extra[0]) {
                    x = i->extra[0] == 1 ? resized((uint64_t)(x * y), bits, 0) : x * y >> bits;
                    y = resized(R(o[3]), bits, 0);
                }
                x += y + (i->extra[2] ? w->carry[l] : 0);
                if (i->extra[3])
                    w->carry[l] = (uint8_t)(x >> bits);
                R(o[0]) = resized((uint64_t)x, bits, 0);
            }
            break;
        case UNPACK: { /* extra: 0 parts, 1 bits of each */
            EACH {
                uint64_t value = R(o[i->extra[0]]);
                for (int v = 0; v < i->extra[0]; v++)
                    R(o[v]) = value >> v * i->extra[1]
                              & (i->extra[1] == 64 ? ~0ull : (1ull << i->extra[1]) - 1);
            }
            break;
        }
        case PACK: { /* of 128 bits, only what the machine has written for clusters: the first 64 */
            EACH {
                uint64_t value = 0;
                for (int v = 0; v < i->extra[0] && v * i->extra[1] < 64; v++)
                    value |= (R(o[1 + v]) & (i->extra[1] == 64 ? ~0ull : (1ull << i->extra[1]) - 1))
                             << v * i->extra[1];
                R(o[0]) = value;
            }
            break;
        }
        case SETP: { /* extra: 0 comparison, 1 type, 2 how to join, 3 two results, 4 of halves */
            int at = i->extra[3] ? 2 : 1;
            EACH {
                int first = compared(i->extra[0], i->extra[1], R(o[at]), R(o[at + 1])),
                    second = !first;
                if (i->extra[4])
                    second = compared(i->extra[0], i->extra[1], R(o[at]) >> 16, R(o[at + 1]) >> 16);
                if (i->extra[2]) {
                    int with = R(o[at + 2]) & 1;
                    first = i->extra[2] == 1 ? first & with
                            : i->extra[2] == 2 ? first | with : first ^ with;
                    second = i->extra[2] == 1 ? second & with
                             : i->extra[2] == 2 ? second | with : second ^ with;
                }
                if (i->extra[3])
                    R(o[1]) = second;
                R(o[0]) = first;
            }
            break;
        }
        case SHFL: { /* d[|p], a, lane, clamp, members; extra: 0 kind, 1 with a predicate */
            int at = i->extra[1] ? 2 : 1, first = __builtin_ctz(mask);
            uint32_t members = (uint32_t)r[(uint64_t)o[at + 3] * LANES + first];
            uint64_t from[LANES];
            if (!whole(w, members, mask))
                return 0;
            for (int l = 0; l < LANES; l++)
                from[l] = R(o[at]);
            EACH {
                uint32_t by = (uint32_t)R(o[at + 1]), c = (uint32_t)R(o[at + 2]);
                int clamp = c & 31, segment = c >> 8 & 31, most = (l & segment) | (clamp & ~segment);
                int least = l & segment, j, ok;
                by &= 31;
                switch (i->extra[0]) {
                case 0: j = least | (by & ~segment); ok = j <= most; break;
                case 1: j = l ^ by; ok = j <= most; break;
                case 2: j = l + by; ok = j <= most; break;
                default: j = l - by; ok = j >= most; break;
                }
                if (!ok)
                    j = l;
                if (!(mask >> j & 1))
                    fail("a shuffle from thread %d, which is not there", j);
                R(o[0]) = (uint32_t)from[j];
                if (i->extra[1])
                    R(o[1]) = ok;
            }
            break;
        }
        case ELECT: { /* d|p, members */
            uint32_t members = (uint32_t)r[(uint64_t)o[2] * LANES + __builtin_ctz(mask)];
            if (!whole(w, members, mask))
                return 0;
            int leader = __builtin_ctz(mask & members);
            EACH {
                R(o[0]) = leader;
                R(o[1]) = l == leader;
            }
            break;
        }
        case VOTE: { /* d, p, members; extra: 0 kind */
            uint32_t members = (uint32_t)r[(uint64_t)o[2] * LANES + __builtin_ctz(mask)], yes = 0;
            if (!whole(w, members, mask))
                return 0;
            EACH yes |= (uint32_t)(R(o[1]) & 1) << l;
            EACH R(o[0]) = i->extra[0] == 0 ? yes != 0 : i->extra[0] == 1 ? yes == mask
                           : i->extra[0] == 2 ? yes : (yes == 0 || yes == mask);
            break;
        }
        case STMATRIX:   /* [row], registers; extra: 0 matrices, 1 transposed */
        case LDMATRIX: { /* registers, [row]: matrices of 8 x 8 elements of 16 bits */
            int n = i->extra[0], store = i->op == OTHER_OPS + STMATRIX, at = store ? 0 : n;
            int values = store ? 2 : 0;
            if (!whole(w, FULL, mask) || mask != FULL)
                return 0;
            for (int m = 0; m < n; m++)
                for (int row = 0; row < 8; row++) {
                    int l = 8 * m + row;
                    uint32_t address = (uint32_t)(R(o[at]) + R(o[at + 1]));
                    uint8_t *p = memory_at(b, 1, address, 16, store);
                    for (int column = 0; column < 8; column++) {
                        int x = i->extra[1] ? column : row, y = i->extra[1] ? row : column;
                        l = x * 4 + y / 2;
                        uint64_t *v = &R(o[values + m]);
                        if (store)
                            memcpy(p + 2 * column, (uint8_t *)v + y % 2 * 2, 2);
                        else {
                            if (y % 2 == 0 && !i->extra[1])
                                *v = 0;
                            *v &= ~0xffffffff00000000ull;
                            memcpy((uint8_t *)v + y % 2 * 2, p + 2 * column, 2);
                        }
                    }
                }
            break;
        }
        case MATCH: {
            uint64_t value[LANES];
            for (int l = 0; l < LANES; l++)
                value[l] = R(o[1]);
            EACH {
                uint32_t same = 0;
                for (int j = 0; j < LANES; j++)
                    same |= (uint32_t)(mask >> j & 1 && value[j] == value[l]) << j;
                R(o[0]) = same;
            }
            break;
        }
        case REDUX: { /* d, a, members; extra: 0 kind, 1 type */
            uint32_t members = (uint32_t)r[(uint64_t)o[2] * LANES + __builtin_ctz(mask)];
            uint64_t total = 0;
            int any = 0;
            if (!whole(w, members, mask))
                return 0;
            EACH {
                total = any ? atomic(i->extra[0], i->extra[1], total, R(o[1])  & FULL, 0) : R(o[1]);
                any = 1;
            }
            EACH R(o[0]) = (uint32_t)total;
            break;
        }
        case BAR_WARP:
            if (!whole(w, (uint32_t)r[(uint64_t)o[0] * LANES + __builtin_ctz(mask)], mask))
                return 0;
            break;
        case BAR_SYNC:
        case BAR_ARRIVE: { /* id [, threads] */
            int first = __builtin_ctz(mask);
            if (!whole(w, FULL, mask))
                return 0;
            uint32_t id = (uint32_t)r[(uint64_t)o[0] * LANES + first];
            int threads = i->count > 1 ? (int)r[(uint64_t)o[1] * LANES + first] : b->warp_count * 32;
            if (id >= MAX_BARRIERS || threads % 32 || threads == 0)
                fail("barrier %u of %d threads", id, threads);
            named_barrier *n = b->barriers + id;
            if (n->arrived && n->expected != threads)
                fail("barrier %u of %d and of %d threads", id, n->expected, threads);
            n->expected = threads;
            n->arrived += 32;
            if (i->op == OTHER_OPS + BAR_SYNC)
                w->waiting = 16 + (int)id;
            if (n->arrived > threads)
                fail("barrier %u has more than %d threads", id, threads);
            if (n->arrived == threads) {
                for (int j = 0; j < b->warp_count; j++)
                    if (b->warps[j].waiting == 16 + (int)id)
                        b->warps[j].waiting = 0;
                n->arrived = 0;
            }
            break;
        }
        case CLUSTER_ARRIVE: {
            cluster *c = b->cluster;
            if (!whole(w, FULL, mask))
                return 0;
            w->cluster_phase = c->phase + 1;
            cluster_check(c);
            break;
        }
        case CLUSTER_WAIT:
            if (!whole(w, FULL, mask))
                return 0;
            if (w->cluster_phase == 0)
                fail("a wait at the barrier of the cluster before an arrival");
            if (b->cluster->phase < w->cluster_phase)
                return 0;
            break;
        case MB_INIT:
            EACH {
                uint32_t at = (uint32_t)(R(o[0]) + R(o[1]));
                barrier_init(shared_at(b, at, 8), (int32_t)R(o[2]));
            }
            break;
        case MB_ARRIVE: { /* extra: 0 place of the address, 1 has a count */
            int at = i->extra[0];
            EACH barrier_arrive(shared_at(b, (uint32_t)(R(o[at]) + R(o[at + 1])), 8),
                                i->extra[1] ? (int32_t)R(o[at + 2]) : 1, 0);
            break;
        }
        case MB_EXPECT:
        case MB_ARRIVE_EXPECT: {
            int at = i->extra[0];
            EACH barrier_arrive(shared_at(b, (uint32_t)(R(o[at]) + R(o[at + 1])), 8),
                                i->op == OTHER_OPS + MB_ARRIVE_EXPECT, (int64_t)(uint32_t)R(o[at + 2]));
            break;
        }
        case MB_WAIT: { /* p, [barrier], parity */
            int waits = 0;
            EACH {
                mbarrier m = barrier_read(shared_at(b, (uint32_t)(R(o[1]) + R(o[2])), 8));
                R(o[0]) = m.phase != (int)(R(o[3]) & 1);
                waits |= !R(o[0]);
            }
            if (waits)
                w->waiting = 3;
            break;
        }
        case MAPA:
            EACH {
                /* the compiler computes addresses ahead of the branch that needs them: those of
                   blocks that do not exist fail when they are used */
                uint32_t rank = (uint32_t)R(o[2]) < 254 ? (uint32_t)R(o[2]) : 254;
                R(o[0]) = ((uint32_t)R(o[1]) & 0xffffff) | (rank + 1) << 24;
            }
            break;
        case ST_ASYNC: { /* [address], values, [barrier]; extra: 0 vector */
            int n = i->extra[0];
            EACH {
                uint32_t to = (uint32_t)(R(o[0]) + R(o[1])),
                         barrier = (uint32_t)(R(o[2 + n]) + R(o[3 + n]));
                copy c = { .kind = 2, .width = n, .bytes = 4 * n };
                if (to % (4 * n))
                    fail("misaligned st.async at %u", to);
                c.to = owner(b, &to), c.address = to;
                if (owner(b, &barrier) != c.to)
                    fail("st.async with its barrier in another block");
                c.barrier = barrier;
                for (int v = 0; v < n; v++)
                    c.values[v] = R(o[2 + v]);
                start(c);
            }
            break;
        }
        case COPY_TENSOR: { /* [to], [map, coordinates], [barrier], mask?; extra: 0 rank, 1 multicast */
            int n = i->extra[0];
            EACH {
                uint32_t to = (uint32_t)(R(o[0]) + R(o[1]));
                uint32_t barrier = (uint32_t)(R(o[4 + n]) + R(o[5 + n]));
                copy c = { .kind = 0, .map = R(o[2]) + R(o[3]), .rank = n };
                for (int v = 0; v < n; v++)
                    c.coordinates[v] = (int32_t)R(o[4 + v]);
                if (to % 128)
                    fail("a tensor copy to byte %u of shared memory", to);
                if (i->extra[1]) {
                    uint32_t blocks = (uint32_t)R(o[6 + n]);
                    for (int j = 0; j < b->cluster->count; j++)
                        if (blocks >> j & 1) {
                            c.to = b->cluster->blocks + j;
                            c.address = to & 0xffffff, c.barrier = barrier & 0xffffff;
                            start(c);
                        }
                } else {
                    c.to = owner(b, &to), c.address = to;
                    if (owner(b, &barrier) != c.to)
                        fail("a copy with its barrier in another block");
                    c.barrier = barrier;
                    start(c);
                }
            }
            break;
        }
        case HAND_ASK: { /* [answer], [barrier]; extra: 0 for all blocks of the cluster */
            cluster *asks = b->cluster;
            EACH {
                uint32_t to = (uint32_t)(R(o[0]) + R(o[1])),
                         barrier = (uint32_t)(R(o[2]) + R(o[3]));
                copy c = { .kind = 2, .width = 4, .bytes = 16 };
                if (to % 16)
                    fail("an answer of 16 bytes at byte %u", to);
                if (asks->refused)
                    fail("it has asked for another block, and none was left");
                /* other kernels may need the multiprocessor */
                asks->refused = M.next == M.clusters || draw() % 8 == 0;
                c.values[0] = asks->refused ? 0 : M.next++;
                c.values[1] = ANSWER | !asks->refused;
                for (int n = 0; n < asks->count; n++) {
                    c.to = i->extra[0] ? asks->blocks + n : b;
                    c.address = to & 0xffffff, c.barrier = barrier & 0xffffff;
                    if (i->extra[0] || n == 0)
                        start(c);
                }
            }
            break;
        }
        case HAND_FOUND:
            EACH {
                if ((R(o[1]) >> 32 | 1) != (ANSWER | 1))
                    fail("no answer about another block");
                R(o[0]) = R(o[1]) >> 32 & 1;
            }
            break;
        case HAND_BLOCK: { /* extra: 0 axis */
            int axis = i->extra[0];
            EACH {
                uint32_t per[3], at = (uint32_t)R(o[1]);
                if (R(o[1]) >> 32 != (ANSWER | 1))
                    fail("the place of a block that was not handed out");
                for (int n = 0; n < 3; n++)
                    per[n] = M.l->grid[n] / M.l->cluster[n];
                uint32_t places[3] = { at % per[0], at / per[0] % per[1], at / per[0] / per[1] };
                R(o[0]) = places[axis] * M.l->cluster[axis];
            }
            break;
        }
        case COPY_LINEAR: { /* [to], [from], bytes, [barrier] */
            EACH {
                uint32_t to = (uint32_t)(R(o[0]) + R(o[1])), barrier = (uint32_t)(R(o[5]) + R(o[6]));
                copy c = { .kind = 1, .source = R(o[2]) + R(o[3]), .bytes = (uint32_t)R(o[4]) };
                if (to % 16 || c.source % 16 || c.bytes % 16)
                    fail("a bulk copy of %u bytes from %#llx to %u", c.bytes,
                         (unsigned long long)c.source, to);
                c.to = owner(b, &to), c.address = to;
                owner(b, &barrier);
                c.barrier = barrier;
                start(c);
            }
            break;
        }
        case COPY_OUT: /* [to], [from], bytes: shared to global memory */
            EACH {
                uint32_t from = (uint32_t)(R(o[2]) + R(o[3])), bytes = (uint32_t)R(o[4]);
                copy c = { .kind = 1, .to = b, .address = from, .bytes = bytes, .w = w,
                           .source = R(o[0]) + R(o[1]), .group = w->out_groups + 1 };
                if (c.source % 16 || from % 16 || bytes % 16)
                    fail("a bulk copy of %u bytes from %u", bytes, from);
                start_out(c);
            }
            break;
        case TENSOR_OUT: { /* [map, coordinates], [from]; extra: 0 rank */
            int n = i->extra[0];
            EACH {
                copy c = { .kind = 0, .to = b, .map = R(o[0]) + R(o[1]), .rank = n, .w = w,
                           .address = (uint32_t)(R(o[2 + n]) + R(o[3 + n])),
                           .group = w->out_groups + 1 };
                for (int v = 0; v < n; v++)
                    c.coordinates[v] = (int32_t)R(o[2 + v]);
                if (c.address % 128)
                    fail("a tensor copy from byte %u of shared memory", c.address);
                start_out(c);
            }
            break;
        }
        case OUT_COMMIT: /* by whole warps: the threads of a warp are not told apart */
            w->out_groups++;
            break;
        case OUT_WAIT:
            finish_out(w, w->out_groups - (int)r[(uint64_t)o[0] * LANES + __builtin_ctz(mask)]);
            break;
        case COPY_ASYNC: /* [to], [from], bytes [, bytes read]: cp.async */
            EACH {
                uint32_t to = (uint32_t)(R(o[0]) + R(o[1])), bytes = (uint32_t)R(o[4]);
                uint32_t read = i->count > 5 ? (uint32_t)R(o[5]) : bytes;
                uint8_t *there = shared_at(b, to, bytes);
                memset(there, 0, bytes);
                if (read)
                    memcpy(there, global_at(R(o[2]) + R(o[3]), read, 0), read);
                written(b, to, bytes);
            }
            break;
        case WGMMA: { /* extra: see run_product; operands: fragments, A, B, scale, ... */
            if (!whole(w, FULL, mask) || mask != FULL)
                return 0;
            int at = i->extra[0] / 2 + (i->extra[2] ? 4 : 1);
            product q = { w, b, i, w->groups + 1, 0, r[(uint64_t)o[at] * LANES],
                          (int)(r[(uint64_t)o[at + 1] * LANES] & 1) };
            if (!i->extra[2])
                q.a = r[(uint64_t)o[at - 1] * LANES];
            if (M.product_count == PRODUCTS)
                fail("too many products under way");
            if (M.l->late)
                M.products[M.product_count++] = q;
            else
                run_product(&q);
            break;
        }
        case WGMMA_COMMIT:
            if (!whole(w, FULL, mask))
                return 0;
            w->groups++;
            break;
        case WGMMA_WAIT:
            if (!whole(w, FULL, mask))
                return 0;
            run_products(w, w->groups - (int)r[(uint64_t)o[0] * LANES]);
            M.now = i;
            break;
        case TENSOR_ALLOC: /* [to], columns; extra: 0 of two blocks */
            if (!whole(w, FULL, mask) || mask != FULL)
                return 0;
            if (i->extra[0] && !both_call(b, w))
                return 0;
            take_columns(b, (uint32_t)(r[(uint64_t)o[0] * LANES] + r[(uint64_t)o[1] * LANES]),
                         (uint32_t)r[(uint64_t)o[2] * LANES], i->extra[0] ? other(b) : NULL);
            break;
        case TENSOR_FREE: /* first, columns; extra: 0 of two blocks */
            if (!whole(w, FULL, mask) || mask != FULL)
                return 0;
            if (i->extra[0] && !both_call(b, w))
                return 0;
            give_columns(b, (uint32_t)r[(uint64_t)o[0] * LANES], (uint32_t)r[(uint64_t)o[1] * LANES]);
            break;
        case TENSOR_MOVE: { /* registers and [from], or [to] and registers; extra: see transfer */
            if (!whole(w, FULL, mask) || mask != FULL)
                return 0;
            int at = i->extra[2] ? 0 : i->count - 2;
            uint64_t there = r[(uint64_t)o[at] * LANES] + r[(uint64_t)o[at + 1] * LANES];
            start_transfer(b, w, i, (uint32_t)there);
            break;
        }
        case TENSOR_WAIT: /* extra: 0 for stores */
            if (!whole(w, FULL, mask) || mask != FULL)
                return 0;
            finish_transfers(b, w, i->extra[0]);
            M.now = i;
            break;
        case TENSOR_ISSUE: { /* [D], A, B, shape, ..., adds; or [barrier], ranks?; extra: see
                              * run_issued */
            if (mask & (mask - 1))
                fail("an instruction of one thread that several run");
            int l = __builtin_ctz(mask), at = i->extra[1] ? 4 : 3;
            issued q = { .w = w, .b = b, .i = i };
            if (i->extra[0]) {
                q.barrier = (uint32_t)(R(o[0]) + R(o[1])) & 0xffffff;
                q.ranks = i->count > 2 ? (uint32_t)R(o[2]) & 0xffff : 1u << b->rank;
            } else {
                q.d = (uint32_t)(R(o[0]) + R(o[1]));
                q.a = R(o[2]) + (i->extra[1] ? R(o[3]) : 0);
                q.bd = R(o[at]), q.shape = (uint32_t)R(o[at + 1]), q.adds = R(o[i->count - 1]) & 1;
            }
            issue(q);
            M.b = b, M.now = i, M.now_warp = (int)(w - b->warps);
            break;
        }
        case TENSOR_BEFORE:
            publish_columns(b, (int)(w - b->warps));
            break;
        case TENSOR_AFTER:
            w->after = M.clock;
            break;
        case FENCE_PROXY:
            w->fence++;
            break;
        case ATOM: { /* [d,] [address], x [, y]; extra: 0 how, 1 type, 2 bytes, 3 space, 4 result */
            int at = i->extra[4];
            EACH {
                uint64_t old = 0, value;
                uint8_t *p = memory_at(b, i->extra[3], R(o[at]) + R(o[at + 1]), i->extra[2], 1);
                memcpy(&old, p, i->extra[2]);
                value = atomic(i->extra[0], i->extra[1], old, R(o[at + 2]),
                               i->count > at + 3 ? R(o[at + 3]) : 0);
                memcpy(p, &value, i->extra[2]);
                if (at)
                    R(o[0]) = old;
            }
            w->waiting = 3;
            break;
        }
        default:
            fail("an operation that the machine does not have");
        }
    M.changes += i->op < INTEGER_OPS && i->op > OTHER_OPS + LD && i->op != OTHER_OPS + SETP
                 && i->op != OTHER_OPS + MB_WAIT && i->op != OTHER_OPS + NOTHING;
next:
    for (int l = 0; l < LANES; l++)
        if (group >> l & 1)
            w->pc[l] = pc + 1;
    return 1;
}

/* ---------------------------------------------------------------------------------- schedule */

/* Runs a warp for a while. */
static void run_warp(block *b, warp *w, int slice)
{
    int done = 0;
    M.b = b, M.now_warp = (int)(w - b->warps);
    if (w->waiting == 3)
        w->waiting = 0;
    while (done < slice && w->alive && !w->waiting) {
        uint32_t left = w->alive;
        int progress = 0;
        /* the threads that are farthest behind go first, so that they meet again */
        while (left) {
            int least = INT32_MAX;
            uint32_t group = 0;
            for (int l = 0; l < LANES; l++)
                if (left >> l & 1) {
                    if (w->pc[l] < least)
                        least = w->pc[l], group = 0;
                    if (w->pc[l] == least)
                        group |= 1u << l;
                }
            if (least >= M.p->length)
                fail("runs past its end");
            left &= ~group;
            if (step(b, w, group)) {
                progress = 1, done++;
                /* a thread that waits for another of its warp must not keep it from going on */
                if (w->waiting == 3 && left) {
                    w->waiting = 0;
                    continue;
                }
                break;
            }
        }
        if (!progress)
            break;
    }
    M.steps += done;
    if (!w->alive) {
        if (M.product_count)
            run_products(w, INT32_MAX);
        finish_out(w, INT32_MAX);
        b->alive_warps--;
        for (int n = 0; b->alive_warps == 0 && b->tensor && n < COLUMNS; n++)
            if (b->columns[n].taken)
                fail("a block ends and has column %d of tensor memory", n);
        if (b->alive_warps == 0)
            b->cluster->alive--;
        cluster_check(b->cluster);
    }
    M.now = NULL;
}

static void *allocated(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p)
        fail("no memory");
    return p;
}

static cluster *new_cluster(uint32_t number)
{
    const launch *l = M.l;
    uint32_t per[3], count = l->cluster[0] * l->cluster[1] * l->cluster[2];
    uint32_t threads = l->block[0] * l->block[1] * l->block[2];
    cluster *c = allocated(sizeof *c);
    for (int i = 0; i < 3; i++)
        per[i] = l->grid[i] / l->cluster[i];
    uint32_t at[3] = { number % per[0], number / per[0] % per[1], number / per[0] / per[1] };
    c->blocks = allocated(count * sizeof *c->blocks);
    c->count = c->alive = (int32_t)count;
    for (uint32_t n = 0; n < count; n++) {
        block *b = c->blocks + n;
        uint32_t in[3] = { n % l->cluster[0], n / l->cluster[0] % l->cluster[1],
                           n / l->cluster[0] / l->cluster[1] };
        b->cluster = c, b->rank = n;
        for (int i = 0; i < 3; i++)
            b->id[i] = at[i] * l->cluster[i] + in[i];
        b->shared = malloc(SHARED);
        b->stamp = allocated(SHARED / 16 * 4);
        memset(b->shared, 0xff, SHARED); /* NaN, whatever the type */
        b->warp_count = b->alive_warps = (int32_t)(threads + 31) / 32;
        b->warps = allocated(b->warp_count * sizeof *b->warps);
        for (int j = 0; j < b->warp_count; j++) {
            warp *w = b->warps + j;
            size_t bytes = (size_t)M.p->registers * LANES * 8;
            uint32_t live = threads - 32 * j >= 32 ? 32 : threads - 32 * j;
            w->r = malloc(bytes);
            memset(w->r, 0xff, bytes);
            w->local = malloc((size_t)M.p->local * LANES + 1);
            memset(w->local, 0xff, (size_t)M.p->local * LANES);
            w->alive = live == 32 ? FULL : (1u << live) - 1;
            for (int l2 = 0; l2 < LANES; l2++) {
                uint64_t *r = w->r;
                int l = l2;
                for (int k = 0; k < M.p->constant_count; k++)
                    R(M.p->constant_registers[k]) = (uint64_t)M.p->constants[k];
                for (int k = 0; k < M.p->special_count; k++) {
                    uint32_t which = (uint32_t)M.p->specials[k], axis = which & 3, t = 32 * j + l;
                    uint32_t tid[3] = { t % M.l->block[0], t / M.l->block[0] % M.l->block[1],
                                        t / M.l->block[0] / M.l->block[1] };
                    uint64_t value = 0;
                    switch (which >> 2) {
                    case 0: value = tid[axis]; break;
                    case 1: value = b->id[axis]; break;
                    case 2: value = M.l->block[axis]; break;
                    case 3: value = M.l->grid[axis]; break;
                    case 4: value = l; break;
                    case 5: value = b->rank; break;
                    case 6: value = (uint64_t)c->count; break;
                    case 7: value = in[axis]; break;
                    case 8: value = M.l->cluster[axis]; break;
                    case 9: value = at[axis]; break;
                    case 10: value = per[axis]; break;
                    case 11: value = t / 32; break;
                    case 12: value = (1ull << l) - 1; break;
                    case 13: value = 0; break;
                    }
                    R(M.p->special_registers[k]) = value;
                }
            }
        }
    }
    return c;
}

static void free_cluster(cluster *c)
{
    for (int n = 0; n < c->count; n++) {
        for (int j = 0; j < c->blocks[n].warp_count; j++)
            free(c->blocks[n].warps[j].r), free(c->blocks[n].warps[j].local);
        free(c->blocks[n].warps);
        free(c->blocks[n].shared);
        free(c->blocks[n].stamp);
        free(c->blocks[n].tensor), free(c->blocks[n].columns);
    }
    free(c->blocks);
    free(c);
}

static void stuck(cluster *running)
{
    char text[900] = "";
    int at = 0;
    block *b = NULL;
    for (cluster *c = running; c && at < 700; c = c->next)
        for (int n = 0; n < c->count && at < 700; n++)
            for (int j = 0; j < c->blocks[n].warp_count && at < 700; j++) {
                warp *w = c->blocks[n].warps + j;
                if (!w->alive)
                    continue;
                b = c->blocks + n;
                at += snprintf(text + at, sizeof text - at, " block %u warp %d at %d (%s),", b->id[0],
                               j, w->pc[__builtin_ctz(w->alive)],
                               w->waiting >= 16 ? "barrier" : w->waiting ? "yields" : "stands");
            }
    M.now = NULL;
    fail("%s:%s", M.too_large ? "too many instructions" : "no warp goes on", text);
}

/* Runs all blocks. Returns 0, or with a message 1, or 2 where the limit is reached. */
int run(const program *p, const launch *l, char *message, int64_t *steps)
{
    cluster *running = NULL;
    volatile int count = 0, idle = 0;
    memset(&M, 0, sizeof M);
    M.p = p, M.l = l, M.random = l->seed * 2654435761u | 1;
    M.copies = malloc(COPIES * sizeof *M.copies);
    M.outs = malloc(COPIES * sizeof *M.outs);
    M.products = malloc(PRODUCTS * sizeof *M.products);
    M.queue = malloc(PRODUCTS * sizeof *M.queue);
    message[0] = 0;
    if (setjmp(M.failed)) {
        strcpy(message, M.message);
        while (running) {
            cluster *c = running->next;
            free_cluster(running);
            running = c;
        }
        free(M.copies), free(M.outs), free(M.products), free(M.queue);
        return M.too_large ? 2 : 1;
    }
    M.clusters = l->grid[0] * l->grid[1] * l->grid[2]
                 / (l->cluster[0] * l->cluster[1] * l->cluster[2]);
    while (M.next < M.clusters || running) {
        while (count < l->resident && M.next < M.clusters) {
            cluster *c = new_cluster(M.next++);
            c->next = running, running = c, count++;
        }
        int64_t changes = M.changes;
        for (cluster *c = running; c; c = c->next)
            for (int n = 0; n < c->count; n++) {
                block *b = c->blocks + n;
                uint32_t from = draw();
                for (int j = 0; j < b->warp_count; j++) {
                    warp *w = b->warps + (j + from) % b->warp_count;
                    if (w->alive && w->waiting < 16)
                        run_warp(b, w, 1 + draw() % SLICE);
                }
                if (M.copy_count)
                    arrivals(0);
            }
        for (cluster **at = &running; *at;)
            if ((*at)->alive == 0) {
                cluster *c = *at;
                for (int i = 0; i < M.copy_count; i++)
                    if (M.copies[i].to->cluster == c) {
                        M.now = NULL;
                        fail("a block ended before a copy to it arrived (instruction %d)",
                             M.copies[i].pc);
                    }
                *at = c->next;
                free_cluster(c);
                count--, M.changes++;
            } else
                at = &(*at)->next;
        /* warps that poll memory run instructions and change nothing */
        int moved = M.changes != changes || (M.copy_count && arrivals(1)) || run_queue();
        idle = moved ? 0 : idle + 1;
        if (idle > PATIENCE)
            stuck(running);
        if (M.steps > l->limit)
            M.too_large = 1, stuck(running);
    }
    *steps = M.steps;
    free(M.copies), free(M.outs), free(M.products), free(M.queue);
    return 0;
}
