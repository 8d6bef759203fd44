// The rule as a C++ kernel: each thread steps an equal share of all coordinates, chunk by chunk.
//
// This is a translation of Rule.update and of the arithmetic of formats.py, operation by operation as in
// cuda/kernel.py, and is tested against all three. Tensors are found through the same table of addresses (table.py).
// library.py writes the enums, the constants of formats.py and `struct Arguments` above this text, and compiles it
// without contraction to fused multiply-adds: the results depend neither on the compiler, nor on the CPU, nor on the
// number of threads.
//
// Loops are over BLOCK coordinates, a constant, so that compilers emit vector code without remainders. The last block
// of a tensor is stepped in buffers.

#include <math.h>
#include <pthread.h>
#include <string.h>

namespace {

#define LOOP _Pragma("omp simd") for (int i = 0; i < BLOCK; i++)
#define NOINLINE __attribute__((noinline))  // compiled once instead of at each call

template <class T> struct Pointed;
template <class T> struct Pointed<T *> { using type = T; };
template <class T> using remove_pointer = typename Pointed<T>::type;

template <class To, class From> inline To bit_cast(From value) {
    To to;
    memcpy(&to, &value, sizeof to);
    return to;
}

inline float square_root(float value) { return __builtin_sqrtf(value); }
inline double square_root(double value) { return __builtin_sqrt(value); }
inline float magnitude(float value) { return __builtin_fabsf(value); }
inline double magnitude(double value) { return __builtin_fabs(value); }

#if defined(__AVX512BW__) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
// Vectors, where compilers make less of a loop
#define HAS_VECTORS

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(64)));

inline Floats magnitude(Floats value) { return Floats(Words(value) & 0x7FFFFFFF); }

inline Floats square_root(Floats value) {
    for (int i = 0; i < 16; i++) value[i] = square_root(value[i]);
    return value;
}

#endif
#endif

// Conversions; to a narrower type they round to the nearest, ties to even

struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

inline float widen(bfloat16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

inline float widen(float16 value) {
    uint32_t bits = uint32_t(value.bits & 0x7FFF) << 13, sign = uint32_t(value.bits & 0x8000) << 16;
    uint32_t finite = bit_cast<uint32_t>(bit_cast<float>(bits) * 0x1p112f);  // also right for denormal numbers
    return bit_cast<float>((bits < 0x7C00u << 13 ? finite : bits | 0x7F800000u) | sign);
}

NOINLINE void convert(double *__restrict to, const float *__restrict from) { LOOP to[i] = from[i]; }
NOINLINE void convert(float *__restrict to, const double *__restrict from) { LOOP to[i] = float(from[i]); }
NOINLINE void convert(float *__restrict to, const bfloat16 *__restrict from) { LOOP to[i] = widen(from[i]); }
NOINLINE void convert(float *__restrict to, const float16 *__restrict from) { LOOP to[i] = widen(from[i]); }

NOINLINE void convert(bfloat16 *__restrict to, const float *__restrict from) {
    LOOP {
        uint32_t bits = bit_cast<uint32_t>(from[i]), rounded = bits + 0x7FFF + ((bits >> 16) & 1);
        to[i].bits = uint16_t((from[i] == from[i] ? rounded : bits | 0x400000) >> 16);
    }
}

NOINLINE void convert(float16 *__restrict to, const float *__restrict from) {
    LOOP {
        uint32_t sign = bit_cast<uint32_t>(from[i]) & 0x80000000, bits = bit_cast<uint32_t>(from[i]) ^ sign;
        uint32_t normal = (bits + 0xFFF + ((bits >> 13) & 1) - (112u << 23)) >> 13;
        uint32_t denormal = bit_cast<uint32_t>(bit_cast<float>(bits) + 0.5f) - 0x3F000000;  // the sum rounds
        uint32_t large = bits > 0x7F800000 ? 0x7E00 : 0x7C00;
        uint32_t size = bits >= 0x477FF000 ? large : bits < 113u << 23 ? denormal : normal;
        to[i].bits = uint16_t((sign >> 16) | size);
    }
}

// Rounding at random

inline uint32_t hash32(uint32_t word) {
    word = (word ^ (word >> 16)) * 0x7FEB352D;
    word = (word ^ (word >> 15)) * 0x846CA68B;
    return word ^ (word >> 16);
}

inline uint32_t get_m_noise(uint32_t word) { return word & 0xFFFF; }
inline uint32_t get_r_noise(uint32_t word) { return word >> 16; }
inline uint32_t get_u_noise(uint32_t word) { return (word >> 8) & 0xFFFF; }
inline uint32_t get_x_noise(uint32_t word) { return (word * GOLDEN) >> 16; }

inline bfloat16 round_at_random(float value, uint32_t noise) {
    uint32_t bits = bit_cast<uint32_t>(value);
    bits = value == value ? bits + noise : bits;
    return {uint16_t(bits >> 16)};
}

// Split master weights: bfloat16 parameters, and the bits that they lack, 8 or 16

template <class Low>
NOINLINE void join_masters(float *__restrict to, const bfloat16 *__restrict x, const Low *__restrict low) {
    LOOP {
        const int rest = int(low[i]) * (sizeof(Low) == 1 ? 256 : 1);
        const bool was_zeroed = (x[i].bits & 0x7FFF) == 0 && rest < 0;  // a weight set to 0 by hand
        to[i] = bit_cast<float>((uint32_t(x[i].bits) << 16) + uint32_t(was_zeroed ? 0 : rest));
    }
}

template <class Low>
NOINLINE void split_masters(
    bfloat16 *__restrict x, Low *__restrict low, const float *__restrict from, uint32_t first, uint32_t key
) {
    constexpr int SHIFT = 16 - 8 * sizeof(Low);
    LOOP {
        const uint32_t noise = SHIFT ? get_x_noise(hash32((first + i) ^ key)) >> 8 : 0;
        const uint32_t bits = bit_cast<uint32_t>(from[i]) + noise, high = (bits + 0x8000) >> 16;
        const int rest = int(bits - (high << 16)) >> SHIFT;
        x[i].bits = uint16_t(from[i] == from[i] ? high : 0x7FC0);
        low[i] = Low(from[i] == from[i] ? rest : 0);
    }
}

// State in 8 bits

inline float decode_signed(uint8_t code, float scale) {
    float size = bit_cast<float>((uint32_t(code & 127) << CUT) + OFFSET_BITS) - OFFSET;
    float value = size * INVERSE_TOP * scale;
    return bit_cast<float>(bit_cast<uint32_t>(value) | (uint32_t(code & 128) << 24));
}

inline uint8_t encode_signed(float value, float factor, uint32_t noise) {
    int part = bit_cast<int>(magnitude(value) * factor + OFFSET);
    int code = ((part + int(noise << (CUT - 16))) >> CUT) - (OFFSET_BITS >> CUT);
    return uint8_t((code < 127 ? code : 127) | ((bit_cast<uint32_t>(value) >> 24) & 128));
}

NOINLINE float find_scale(const float *value) {
    int largest = LEAST;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < BLOCK; i++) {
        int bits = bit_cast<int>(value[i]) & 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    return bit_cast<float>(largest);
}

inline float get_factor(float scale) { return TOP_FACTOR / scale; }

struct Range { int first, cut; };

inline float decode_square(uint8_t code, Range range) {
    return bit_cast<float>(code ? (code + (range.first - 1)) << range.cut : 0);
}

inline uint8_t encode_square(float value, Range range, uint32_t noise) {
    int bits = bit_cast<int>(value) & 0x7FFFFFFF;
    int code = ((bits + int(noise << (range.cut - 16))) >> range.cut) - (range.first - 1);
    return uint8_t(bits ? (code > 1 ? code : 1) : 0);
}

NOINLINE Range find_range(const float *value) {
    uint32_t most = 0, least = ~0u;
#pragma omp simd reduction(max : most) reduction(min : least)
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits = bit_cast<uint32_t>(value[i]) & 0x7FFFFFFF, below = bits - 1;  // 0 - 1 is the largest
        most = bits > most ? bits : most;
        least = below < least ? below : least;
    }
    const int high = int(most), low = int(least + 1);
    Range range = {1, FINE};
    for (int k = FINE; k < COARSE; k++) range.cut += -((-high) >> k) - (low >> k) > 254;
    const int first = -((-high) >> range.cut) - 254;
    if (first > 1) range.first = first;
    return range;
}

// The rule, in float or double

template <class T> struct PerTensor {  // what the coordinates of a tensor share
    T keep;                           // x is multiplied by it: 1 - lr decay if the decay is decoupled, else 1
    T rate;                           // lr / (1 - beta1^t)
    T mean_weight;                    // the smaller of the mean's decay and 1 - decay
    T beta1, beta2, weight2;          // weight2 is 1 - beta2
    T k, inverse_k_before;            // sqrt(1 - beta2^t), and 1 / sqrt(1 - beta2^(t-1)), for the lean mean
    T gain;                           // (1 - beta1) k
    T clip;                           // k / z_clip, or 0
    T eps, eps_s, scale, decay;       // scale divides gradients; decay is added to them if it is coupled
    uint32_t decay_at_most_half, key; // key is the seed of the tensor's random bits at this step
};

inline float get_exp(float value) { return expf(value); }
inline double get_exp(double value) { return exp(value); }

// 1 - beta^t for any t >= 0, by Taylor's series where subtracting would lose digits
template <class T> T get_correction(T t, T log_beta) {
    constexpr int TERMS = sizeof(T) == 8 ? 16 : 8;
    const T y = t * log_beta;
    T series = 1 + y / TERMS;
    for (int n = TERMS - 1; n > 1; n--) series = 1 + y / n * series;
    return y > T(-0.5) ? -y * series : 1 - get_exp(y);
}

template <class T> PerTensor<T> make_per_tensor(const Arguments &a, int64_t tensor) {
    const void *at = (const void *)a.table[STEP * a.tensors + tensor];
    const T t = T(a.step_dtype == FLOAT64 ? *(const double *)at : *(const float *)at);
    const uint32_t index = uint32_t(a.table[INDEX * a.tensors + tensor]);
    const T lr = T(a.lr), k = square_root(get_correction(t, T(a.log_beta2)));
    PerTensor<T> c;
    c.keep = a.decoupled ? 1 - lr * T(a.weight_decay) : 1;
    c.rate = lr * (1 / get_correction(t, T(a.log_beta1)));
    c.mean_weight = T(a.mean_weight);
    c.beta1 = T(a.beta1);
    c.gain = T(1 - a.beta1) * k;
    c.beta2 = T(a.beta2);
    c.weight2 = T(1 - a.beta2);
    c.eps = T(a.eps);
    c.eps_s = T(a.eps_s);
    c.k = k;
    c.inverse_k_before = 1 / square_root(get_correction(t - 1, T(a.log_beta2)) + T(TINY));
    c.clip = a.clipped ? k / T(a.z_clip) : 0;
    c.scale = T(a.grad_scale);
    c.decay = T(a.weight_decay);
    c.decay_at_most_half = uint32_t(a.decay_at_most_half);
    c.key = hash32(hash32(index * GOLDEN + uint32_t(a.seed)) + uint32_t(t));
    return c;
}

template <bool CENTERED_, bool MOMENTUM_LAST_, bool LEAN_> struct Cell {
    static constexpr bool CENTERED = CENTERED_, MOMENTUM_LAST = MOMENTUM_LAST_, LEAN = LEAN_;
    static constexpr bool HAS_MEAN = CENTERED || !MOMENTUM_LAST, STORES_MEAN = HAS_MEAN && !LEAN;
};

// T is the type of the numbers, or a vector of them
template <class C, class T, class Number>
inline void step_coordinate(T &x, T g, T &m, T &r, T &u, const PerTensor<Number> &c) {
    T deviation = g;
    if (C::HAS_MEAN) {
        if (C::LEAN) m = u * (square_root(r) * c.inverse_k_before + c.eps);
        // Small decays interpolate starting from g, as torch's lerp: from a large m, rounding would lose g.
        T difference = c.mean_weight * (g - m);
        m = c.decay_at_most_half ? g - difference : m + difference;
        if (C::CENTERED) deviation = g - m;
    }
    r = c.beta2 * r + c.weight2 * deviation * deviation + c.eps_s;
    if (C::MOMENTUM_LAST) {
        T divisor = square_root(r) + c.eps * c.k;
        if (sizeof(T) == sizeof(Number) || c.clip != 0) {  // loops over numbers are not vectorized with a branch
            T least = magnitude(g) * c.clip;
            divisor = least > divisor ? least : divisor;  // in this order a NaN stays
        }
        u = c.beta1 * u + c.gain * (g / divisor);
        x = x * c.keep - c.rate * u;
    } else {
        x = x * c.keep - c.rate * (m / (square_root(r) / c.k + c.eps));
    }
}

inline float load(float value) { return value; }
inline double load(double value) { return value; }
inline float load(bfloat16 value) { return widen(value); }
inline void store(float &to, float value, uint32_t) { to = value; }
inline void store(double &to, double value, uint32_t) { to = value; }
inline void store(bfloat16 &to, float value, uint32_t noise) { to = round_at_random(value, noise); }

// Blocks with state stored as S. `first` is the index of their first coordinate. Adding i changes only its low bits,
// which are 0, because chunks begin at multiples of their size.
template <class T, class S, class C>
void update(
    T *__restrict x, const T *__restrict g, S *__restrict m_at, S *__restrict r_at, S *__restrict u_at, uint32_t first,
    int blocks, const PerTensor<T> &shared
) {
    const PerTensor<T> c = shared;  // a copy, which stores through the pointers cannot change
    const uint32_t key = c.key ^ first;
    const int n = blocks * BLOCK;
#pragma omp simd
    for (int i = 0; i < n; i++) {
        const uint32_t word = sizeof(S) < 4 ? hash32(uint32_t(i) ^ key) : 0;
        T new_x = x[i], r = load(r_at[i]), m = 0, u = 0;
        if (C::STORES_MEAN) m = load(m_at[i]);
        if (C::MOMENTUM_LAST) u = load(u_at[i]);
        step_coordinate<C>(new_x, g[i], m, r, u, c);
        x[i] = new_x;
        if (C::STORES_MEAN) store(m_at[i], m, get_m_noise(word));
        store(r_at[i], r, get_r_noise(word));
        if (C::MOMENTUM_LAST) store(u_at[i], u, get_u_noise(word));
    }
}

// State in bfloat16, 32 coordinates at a time: the same bits as by the loop above, with fewer instructions to unpack
// and pack, and with prefetches, which a vectorized loop cannot have.
#ifdef HAS_VECTORS

template <class V> inline V load_vector(const void *at) {
    V value;
    memcpy(&value, at, sizeof value);
    return value;
}

struct Pair { Floats values[2]; };

inline Pair load_pair(const bfloat16 *at) {
    const Halves halves = load_vector<Halves>(at), zero = {};
    return {Floats(__builtin_shufflevector(
                zero, halves, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12,
                44, 13, 45, 14, 46, 15, 47)),
            Floats(__builtin_shufflevector(
                zero, halves, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58,
                27, 59, 28, 60, 29, 61, 30, 62, 31, 63))};
}

inline void store_pair(bfloat16 *at, const Pair &pair) {
    const Halves halves = __builtin_shufflevector(
        Halves(pair.values[0]), Halves(pair.values[1]), 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33,
        35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
    memcpy(at, &halves, sizeof halves);
}

template <class C>
void update(
    float *__restrict x, const float *__restrict g, bfloat16 *__restrict m_at, bfloat16 *__restrict r_at,
    bfloat16 *__restrict u_at, uint32_t first, int blocks, const PerTensor<float> &shared
) {
    const PerTensor<float> c = shared;  // a copy, which stores through the pointers cannot change
    const uint32_t key = c.key ^ first, mixed_key = key ^ (key >> 16);  // chunks have at most 2^16 coordinates
    const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < blocks * BLOCK; i += 32) {
        for (int j = i + BLOCK; j < i + BLOCK + 32; j += 16) {
            __builtin_prefetch(x + j);
            __builtin_prefetch(g + j);
        }
        if (C::STORES_MEAN) __builtin_prefetch(m_at + i + BLOCK);
        __builtin_prefetch(r_at + i + BLOCK);
        if (C::MOMENTUM_LAST) __builtin_prefetch(u_at + i + BLOCK);
        Pair m = {}, r = load_pair(r_at + i), u = {};
        if (C::STORES_MEAN) m = load_pair(m_at + i);
        if (C::MOMENTUM_LAST) u = load_pair(u_at + i);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const int at = i + 16 * half;
            const Floats grad = load_vector<Floats>(g + at);
            Floats new_x = load_vector<Floats>(x + at), &new_m = m.values[half], &new_r = r.values[half],
                   &new_u = u.values[half];
            // hash32((first + at + lanes) ^ key). A NaN in g gets no noise. Other NaN have no bits that could carry:
            // those of state in bfloat16 and those that arithmetic makes end with 16 zeros.
            Words word = ((lanes + uint32_t(at)) ^ mixed_key) * 0x7FEB352D;
            word = (word ^ (word >> 15)) * 0x846CA68B & Words(grad == grad);
            const Words high = word >> 16;
            word ^= high;
            step_coordinate<C>(new_x, grad, new_m, new_r, new_u, c);
            memcpy(x + at, &new_x, sizeof new_x);
            new_m = Floats(Words(new_m) + (word & 0xFFFF));
            new_r = Floats(Words(new_r) + high);
            new_u = Floats(Words(new_u) + ((word >> 8) & 0xFFFF));
        }
        if (C::STORES_MEAN) store_pair(m_at + i, m);
        store_pair(r_at + i, r);
        if (C::MOMENTUM_LAST) store_pair(u_at + i, u);
    }
}
#endif

struct Scales { float m, u; Range r; };

// One block with state in 8 bits, of which n coordinates exist: only they may affect the scales
template <class C>
void update_codes(
    float *__restrict x, const float *__restrict g, uint8_t *__restrict m_at, uint8_t *__restrict r_at,
    uint8_t *__restrict u_at, uint32_t first, int n, const PerTensor<float> &shared, Scales &scales
) {
    const PerTensor<float> c = shared;  // a copy, which stores through the pointers cannot change
    const Scales old = scales;
    const uint32_t key = c.key ^ first;
    float new_m[BLOCK], new_r[BLOCK], new_u[BLOCK];
    LOOP {
        float new_x = x[i], r = decode_square(r_at[i], old.r), m = 0, u = 0;
        if (C::STORES_MEAN) m = decode_signed(m_at[i], old.m);
        if (C::MOMENTUM_LAST) u = decode_signed(u_at[i], old.u);
        step_coordinate<C>(new_x, g[i], m, r, u, c);
        x[i] = new_x;
        new_m[i] = m;
        new_r[i] = r;
        new_u[i] = u;
    }
    for (int i = n; i < BLOCK; i++) new_m[i] = new_r[i] = new_u[i] = 0;
    scales = {C::STORES_MEAN ? find_scale(new_m) : 1, C::MOMENTUM_LAST ? find_scale(new_u) : 1, find_range(new_r)};
    const float m_factor = get_factor(scales.m), u_factor = get_factor(scales.u);
    const Range range = scales.r;
    LOOP {
        const uint32_t word = hash32(uint32_t(i) ^ key);
        if (C::STORES_MEAN) m_at[i] = encode_signed(new_m[i], m_factor, get_m_noise(word));
        r_at[i] = encode_square(new_r[i], range, get_r_noise(word));
        if (C::MOMENTUM_LAST) u_at[i] = encode_signed(new_u[i], u_factor, get_u_noise(word));
    }
}

template <class Call> void with_cell(const Arguments &a, Call call) {
    if (a.lean) call(Cell<true, true, true>());
    else if (a.centered && a.momentum_last) call(Cell<true, true, false>());
    else if (a.centered) call(Cell<true, false, false>());
    else if (a.momentum_last) call(Cell<false, true, false>());
    else call(Cell<false, false, false>());
}

// Blocks of any dtypes: those of the arithmetic's own type are stepped where they are, others in buffers

constexpr int get_dtype(float) { return FLOAT32; }
constexpr int get_dtype(double) { return FLOAT64; }
inline int get_bytes(int dtype) { return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : dtype == UINT8 ? 1 : 2; }

template <class T> NOINLINE T *read(char *at, int dtype, T *buffer) {
    if (dtype == get_dtype(T())) return (T *)at;
    if constexpr (sizeof(T) == 8) {
        float single[BLOCK];
        convert(buffer, read<float>(at, dtype, single));
    } else if (dtype == FLOAT64) convert(buffer, (const double *)at);
    else if (dtype == BFLOAT16) convert(buffer, (const bfloat16 *)at);
    else convert(buffer, (const float16 *)at);
    return buffer;
}

template <class T> NOINLINE void write(char *at, int dtype, const T *value) {
    if (dtype == get_dtype(T())) {
        if ((char *)value != at) memcpy(at, value, BLOCK * sizeof(T));
    } else if constexpr (sizeof(T) == 8) {
        float single[BLOCK];
        convert(single, value);
        write<float>(at, dtype, single);
    } else if (dtype == FLOAT64) convert((double *)at, value);
    else if (dtype == BFLOAT16) convert((bfloat16 *)at, value);
    else convert((float16 *)at, value);
}

template <class T>
NOINLINE void prepare_gradients(T *__restrict g, const T *__restrict x, const Arguments &a, PerTensor<T> c) {
    if (a.scaled) LOOP g[i] = g[i] / c.scale;
    if (a.maximize) LOOP g[i] = -g[i];
    if (a.coupled) LOOP g[i] = g[i] + c.decay * x[i];
}

struct Block {
    char *at[ROWS];
    int64_t first, index, count;  // its first coordinate, and which of how many blocks it is
    int n;                        // coordinates that exist

    Scales load_scales() const {
        Scales scales = {};
        if (at[M]) scales.m = ((const float *)at[M_SCALE])[index];
        if (at[U]) scales.u = ((const float *)at[U_SCALE])[index];
        scales.r = {((const int *)at[R_SCALE])[index], ((const int *)at[R_SCALE])[count + index]};
        return scales;
    }

    void store_scales(const Scales &scales) const {
        if (at[M]) ((float *)at[M_SCALE])[index] = scales.m;
        if (at[U]) ((float *)at[U_SCALE])[index] = scales.u;
        ((int *)at[R_SCALE])[index] = scales.r.first;
        ((int *)at[R_SCALE])[count + index] = scales.r.cut;
    }
};

// Narrow state of double parameters
NOINLINE void decode(float values[][BLOCK], const Block &block, int dtype) {
    const Scales scales = dtype == UINT8 ? block.load_scales() : Scales();
    for (int row = M; row <= U; row++) {
        const uint8_t *codes = (const uint8_t *)block.at[row];
        const float scale = row == M ? scales.m : scales.u;
        if (!codes) continue;
        if (dtype == BFLOAT16) convert(values[row], (const bfloat16 *)codes);
        else if (row == R) LOOP values[R][i] = decode_square(codes[i], scales.r);
        else LOOP values[row][i] = decode_signed(codes[i], scale);
    }
}

NOINLINE void encode(float values[][BLOCK], const Block &block, int dtype, uint32_t key) {
    Scales scales = {};
    for (int row = M; row <= U; row++) {
        float *value = values[row], factor = 0;
        if (!block.at[row]) continue;
        for (int i = block.n; i < BLOCK; i++) value[i] = 0;
        if (dtype == UINT8 && row == R) scales.r = find_range(value);
        else if (dtype == UINT8) factor = get_factor((row == M ? scales.m : scales.u) = find_scale(value));
        for (int i = 0; i < BLOCK; i++) {
            const uint32_t word = hash32(uint32_t(block.first + i) ^ key);
            const uint32_t noise =
                row == M ? get_m_noise(word) : row == R ? get_r_noise(word) : get_u_noise(word);
            uint8_t *codes = (uint8_t *)block.at[row];
            if (dtype == BFLOAT16) ((bfloat16 *)codes)[i] = round_at_random(value[i], noise);
            else if (row == R) codes[i] = encode_square(value[i], scales.r, noise);
            else codes[i] = encode_signed(value[i], factor, noise);
        }
    }
    if (dtype == UINT8) block.store_scales(scales);
}

// Steps `blocks` blocks, of which the first is `block`; 1 unless all of them are stepped where they are
template <class T>
NOINLINE void step_blocks(const Arguments &a, const Block &block, int blocks, const PerTensor<T> &c) {
    char *const *at = block.at;
    const uint32_t first = uint32_t(block.first);
    T x_buffer[BLOCK], g_buffer[BLOCK];
    T *x = x_buffer, *g = read(at[GRAD], a.grad_dtype, g_buffer);
    if (!a.master_bits) x = read(at[PARAM], a.param_dtype, x_buffer);
    else if constexpr (sizeof(T) == 4) {
        if (a.master_bits == 24) join_masters(x, (const bfloat16 *)at[PARAM], (const int8_t *)at[LOW]);
        else join_masters(x, (const bfloat16 *)at[PARAM], (const int16_t *)at[LOW]);
    }
    if (a.scaled || a.maximize || a.coupled) {
        if (g != g_buffer) memcpy(g_buffer, g, sizeof g_buffer);
        prepare_gradients(g = g_buffer, x, a, c);
    }
    const auto step = [&](auto *m, decltype(m) r, decltype(m) u) {
        with_cell(a, [&](auto cell) {
#ifdef HAS_VECTORS
            if constexpr (sizeof *m == 2) return update<decltype(cell)>(x, g, m, r, u, first, blocks, c);
            else
#endif
                update<T, remove_pointer<decltype(m)>, decltype(cell)>(x, g, m, r, u, first, blocks, c);
        });
    };
    const bool is_narrow = get_bytes(a.state_dtype) < 4;
    if (a.state_dtype == get_dtype(T())) step((T *)at[M], (T *)at[R], (T *)at[U]);
    else if (sizeof(T) == 8 || a.state_dtype == FLOAT64) {
        T values[ROWS][BLOCK];
        float singles[ROWS][BLOCK];
        if (is_narrow) decode(singles, block, a.state_dtype);
        const int dtype = is_narrow ? FLOAT32 : a.state_dtype;
        for (int row = M; row <= U; row++)
            if (at[row]) read(is_narrow ? (char *)singles[row] : at[row], dtype, values[row]);
        step(values[M], values[R], values[U]);
        for (int row = M; row <= U; row++)
            if (at[row]) write(is_narrow ? (char *)singles[row] : at[row], dtype, values[row]);
        if (is_narrow) encode(singles, block, a.state_dtype, c.key);
    } else if constexpr (sizeof(T) == 4) {
        if (a.state_dtype == BFLOAT16) step((bfloat16 *)at[M], (bfloat16 *)at[R], (bfloat16 *)at[U]);
        else {
            uint8_t *m = (uint8_t *)at[M], *r = (uint8_t *)at[R], *u = (uint8_t *)at[U];
            Scales scales = block.load_scales();
            with_cell(a, [&](auto cell) { update_codes<decltype(cell)>(x, g, m, r, u, first, block.n, c, scales); });
            block.store_scales(scales);
        }
    }
    if (a.master_bits) {
        if constexpr (sizeof(T) == 4) {
            if (a.master_bits == 24) split_masters((bfloat16 *)at[PARAM], (int8_t *)at[LOW], x, first, c.key);
            else split_masters((bfloat16 *)at[PARAM], (int16_t *)at[LOW], x, first, c.key);
        }
    } else if (a.round_params && a.param_dtype == BFLOAT16)
        for (int i = 0; i < BLOCK; i++)
            ((bfloat16 *)at[PARAM])[i] = round_at_random(float(x[i]), get_x_noise(hash32((first + i) ^ c.key)));
    else write(at[PARAM], a.param_dtype, x);
}

// Chunks

constexpr int COORDINATE_ROWS[] = {PARAM, GRAD, M, R, U, LOW};

inline int get_row_bytes(const Arguments &a, int row) {
    if (row == LOW) return a.master_bits == 24 ? 1 : 2;
    return get_bytes(row == PARAM ? a.param_dtype : row == GRAD ? a.grad_dtype : a.state_dtype);
}

template <class T> NOINLINE void step_last_block(const Arguments &a, const Block &block, const PerTensor<T> &c) {
    char buffers[ROWS][BLOCK * 8] = {};
    Block whole = block;
    for (int row : COORDINATE_ROWS)
        if (block.at[row])
            memcpy(whole.at[row] = buffers[row], block.at[row], block.n * get_row_bytes(a, row));
    step_blocks(a, whole, 1, c);
    for (int row : COORDINATE_ROWS)
        if (block.at[row] && row != GRAD)
            memcpy(block.at[row], buffers[row], block.n * get_row_bytes(a, row));
}

// The last tensor that starts at or before a chunk
inline int64_t find_tensor(const Arguments &a, int64_t chunk) {
    int64_t low = 0, high = a.tensors;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (a.starts[middle] <= chunk) low = middle;
        else high = middle;
    }
    return low;
}

template <class T> NOINLINE void step_chunk(const Arguments &a, int64_t chunk) {
    const int64_t tensor = find_tensor(a, chunk), size = a.sizes[tensor];
    const int64_t start = (chunk - a.starts[tensor]) * a.chunk_size;
    const int64_t end = start + a.chunk_size < size ? start + a.chunk_size : size;
    const PerTensor<T> c = make_per_tensor<T>(a, tensor);
    const int own = get_dtype(T());
    const bool in_place = a.param_dtype == own && a.grad_dtype == own && !(a.scaled || a.maximize || a.coupled) &&
                          (a.state_dtype == own || (a.state_dtype == BFLOAT16 && own == FLOAT32));
    Block block;
    block.count = (size + BLOCK - 1) / BLOCK;
    int64_t full;
    for (block.first = start; block.first < end; block.first += full) {
        const int64_t left = end - block.first;
        full = in_place && left >= BLOCK ? left / BLOCK * BLOCK : BLOCK;
        block.index = block.first / BLOCK;
        block.n = left < BLOCK ? int(left) : BLOCK;
        for (int row = 0; row < ROWS; row++)
            block.at[row] = (char *)a.table[row * a.tensors + tensor];
        for (int row : COORDINATE_ROWS)
            if (block.at[row]) block.at[row] += block.first * get_row_bytes(a, row);
        if (left < BLOCK) step_last_block(a, block, c);
        else step_blocks(a, block, int(full / BLOCK), c);
    }
}

void *run(void *arguments) {
    const Arguments &a = *(const Arguments *)arguments;
    const int threads = a.threads < a.chunks ? a.threads : int(a.chunks);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t chunk = 0; chunk < a.chunks; chunk++)
        if (a.param_dtype == FLOAT64) step_chunk<double>(a, chunk);
        else step_chunk<float>(a, chunk);
    return nullptr;
}

bool forked = false;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

}  // namespace

extern "C" void mvngrad_step(const Arguments *arguments) {
    const Arguments &a = *arguments;
    for (int64_t i = 0; i < a.tensors; i++) {
        void *at = (void *)a.table[STEP * a.tensors + i];
        if (a.step_dtype == FLOAT64) *(double *)at += 1;
        else *(float *)at += 1;
    }
    pthread_t fresh;
    // In a forked process the parent's threads are gone, but OpenMP would wait for them. For a thread that never had
    // any, it starts new ones.
    if (forked && a.threads > 1 && pthread_create(&fresh, nullptr, run, (void *)arguments) == 0)
        pthread_join(fresh, nullptr);
    else run((void *)arguments);
}
