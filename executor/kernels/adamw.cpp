// One AdamW step over a block, in one pass over gradient, master and moments.
//
// The formula is executor/adamw.py's, operation by operation: no fused multiply-add, IEEE division and square root,
// denormals kept where it keeps them. Compile with -ffp-contract=off and never with -ffast-math, which would also make the
// whole process flush denormals. -fno-math-errno only lets sqrt become an instruction; it changes no result.
//
// Threads are started for each call: that costs some microseconds a thread against milliseconds of work, leaves none
// spinning beside the threads that feed the GPU, and needs no OpenMP runtime.

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// Elements a thread takes at a time: small enough that a thread which lost its core does not hold up the others.
constexpr std::int64_t kChunk = 1 << 15;

template <typename To, typename From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// A bf16 number, as it lies in memory.
struct Bf16 {
    std::uint16_t bits;
};

inline float widen(Bf16 value) { return bits_as<float>(static_cast<std::uint32_t>(value.bits) << 16); }
inline float widen(float value) { return value; }
inline double widen(double value) { return value; }

// Weights that are their own master.
template <typename RealType>
struct PlainMaster {
    using Real = RealType;
    Real* values;

    Real load(std::int64_t i) const { return values[i]; }
    void store(std::int64_t i, Real value) const { values[i] = value; }
};

// An fp32 master in two planes: bits = (high << 16) + low modulo 2^32, low signed (executor/planes.py).
struct SplitMaster {
    using Real = float;
    std::uint16_t* high;
    std::int16_t* low;

    float load(std::int64_t i) const {
        const std::uint32_t remainder = static_cast<std::uint32_t>(static_cast<std::int32_t>(low[i]));
        return bits_as<float>((static_cast<std::uint32_t>(high[i]) << 16) + remainder);
    }

    void store(std::int64_t i, float value) const {
        std::uint32_t bits = bits_as<std::uint32_t>(value);
        // Some NaN payloads would round to a high plane of -0 and hide the NaN from the model: one NaN for all.
        bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
        high[i] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
        low[i] = static_cast<std::int16_t>(static_cast<std::uint16_t>(bits));
    }
};

// scalars: apply, clip_factor, decay, step_size, root_bias_correction2. constants: beta1, 1 - beta1, beta2, 1 - beta2,
// eps, each already rounded to Real.
template <typename Master, typename Gradient>
void update_range(Master master, typename Master::Real* first_moment, typename Master::Real* second_moment,
                  const Gradient* gradient, std::int64_t begin, std::int64_t end, typename Master::Real decay,
                  const typename Master::Real* scalars, const double* constants) {
    using Real = typename Master::Real;
    const Real clip = scalars[1], step_size = scalars[3], root_bias_correction2 = scalars[4];
    const Real beta1 = static_cast<Real>(constants[0]), one_minus_beta1 = static_cast<Real>(constants[1]);
    const Real beta2 = static_cast<Real>(constants[2]), one_minus_beta2 = static_cast<Real>(constants[3]);
    const Real eps = static_cast<Real>(constants[4]);
    constexpr Real tiny = std::numeric_limits<Real>::min();
#pragma omp simd
    for (std::int64_t i = begin; i < end; ++i) {
        const Real g = widen(gradient[i]) * clip;
        Real m = first_moment[i] * beta1 + g * one_minus_beta1;
        Real v = second_moment[i] * beta2 + (g * g) * one_minus_beta2;
        m = std::fabs(m) < tiny ? Real(0) : m;
        v = std::fabs(m) + v < tiny ? Real(0) : v;  // m is 0, in a form that g++ 12 vectorises
        const Real direction = m / (std::sqrt(v) / root_bias_correction2 + eps);
        first_moment[i] = m;
        second_moment[i] = v;
        master.store(i, master.load(i) * decay - step_size * direction);
    }
}

template <typename Master, typename Gradient>
void update(Master master, void* first_moment, void* second_moment, const void* gradient, std::int64_t num_elements,
            std::int64_t num_decay_elements, const void* scalars, const double* constants, int num_threads) {
    using Real = typename Master::Real;
    const Real* rounded = static_cast<const Real*>(scalars);
    if (rounded[0] == Real(0)) return;

    std::atomic<std::int64_t> next{0};
    auto work = [&]() {
        // Another library may have set this process to flush denormals.
        std::fenv_t callers;
        std::fegetenv(&callers);
        std::fesetenv(FE_DFL_ENV);
        for (;;) {
            const std::int64_t begin = next.fetch_add(kChunk, std::memory_order_relaxed);
            if (begin >= num_elements) break;
            const std::int64_t end = std::min(begin + kChunk, num_elements);
            const std::int64_t border = std::clamp(num_decay_elements, begin, end);
            auto range = [&](std::int64_t from, std::int64_t to, Real decay) {
                update_range(master, static_cast<Real*>(first_moment), static_cast<Real*>(second_moment),
                             static_cast<const Gradient*>(gradient), from, to, decay, rounded, constants);
            };
            range(begin, border, rounded[2]);
            range(border, end, Real(1));
        }
        std::fesetenv(&callers);
    };

    const std::int64_t num_chunks = (num_elements + kChunk - 1) / kChunk;
    const std::int64_t num_workers = std::min<std::int64_t>(num_threads, num_chunks) - 1;
    std::vector<std::thread> workers;
    workers.reserve(static_cast<std::size_t>(std::max<std::int64_t>(num_workers, 0)));
    try {
        while (static_cast<std::int64_t>(workers.size()) < num_workers) workers.emplace_back(work);
    } catch (const std::system_error&) {
        // No more threads to be had: those that started, and this one, share the work.
    }
    work();
    for (std::thread& worker : workers) worker.join();
}

}  // namespace

#define ADAMW(name, master, gradient_type)                                                                            \
    extern "C" void name(void* weights, void* low, void* first_moment, void* second_moment, const void* gradient,    \
                         std::int64_t num_elements, std::int64_t num_decay_elements, const void* scalars,            \
                         const double* constants, int num_threads) {                                                 \
        (void)low;                                                                                                    \
        update<decltype(master), gradient_type>(master, first_moment, second_moment, gradient, num_elements,         \
                                                num_decay_elements, scalars, constants, num_threads);                \
    }

#define SPLIT (SplitMaster{static_cast<std::uint16_t*>(weights), static_cast<std::int16_t*>(low)})
ADAMW(adamw_bf16_bf16, SPLIT, Bf16)
ADAMW(adamw_bf16_fp32, SPLIT, float)
ADAMW(adamw_fp32_bf16, PlainMaster<float>{static_cast<float*>(weights)}, Bf16)
ADAMW(adamw_fp32_fp32, PlainMaster<float>{static_cast<float*>(weights)}, float)
ADAMW(adamw_fp64_fp64, PlainMaster<double>{static_cast<double*>(weights)}, double)
