/* Attention of few queries over keys and values in bfloat16, added up in float64.
 *
 * Reads each key and value once, without a wide copy. Compiled and called by compiled_attention.py.
 * Shapes: A rows, B heads of keys, S queries of each, T keys, D head size. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 8
#else
#define LANES 4
#endif
#define KEYS 256      /* Keys of a block; its scores stay in the nearest cache. */
#define QUERIES 6     /* Queries that read a block together. */
#define MOST_D 512
#define MOST_THREADS 64

typedef double wide __attribute__((vector_size(8 * LANES)));
typedef int64_t whole __attribute__((vector_size(8 * LANES)));
typedef float single __attribute__((vector_size(4 * LANES)));
typedef uint32_t word __attribute__((vector_size(4 * LANES)));
typedef uint16_t half __attribute__((vector_size(2 * LANES)));

typedef struct {
    const double *q;        /* [A, B, S, D], contiguous, times the scale. */
    const uint16_t *k, *v;  /* [A, B, T, D] with strides, D contiguous. */
    const double *bias;     /* [A, S or 1, T] with strides; NULL: none. */
    double *out, *lse;      /* [A, B, S, D] and [A, B, S], contiguous. */
    int64_t rows, heads, queries, keys, size;
    int64_t k_row, k_head, k_key, v_row, v_head, v_key, bias_row, bias_query;
} Call;

static inline wide load(const double *from) {
    wide found;
    memcpy(&found, from, sizeof found);
    return found;
}

static inline void store(double *to, wide value) { memcpy(to, &value, sizeof value); }

static inline wide widened(const uint16_t *from) {
    half bits;
    memcpy(&bits, from, sizeof bits);
    return __builtin_convertvector((single)(__builtin_convertvector(bits, word) << 16), wide);
}

static inline double total(wide lanes) {
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

/* e^x for x <= 0, to the last bit or two; NaN stays NaN, and below -700 it is e^-700. */
static inline wide exponential(wide x) {
    const wide least = {0}, shift = least + 6755399441055744.0; /* 1.5 * 2^52 rounds to integers. */
    const whole small = (whole)(x < -700.0);
    x = (wide)(((whole)x & ~small) | ((whole)(least - 700.0) & small));
    wide turns = x * 1.4426950408889634 + shift;
    whole power = ((whole)turns + 1023) << 52;
    wide n = turns - shift;
    wide r = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
    wide sum = least + 1.0 / 6227020800.0;
    sum = sum * r + 1.0 / 479001600.0;
    sum = sum * r + 1.0 / 39916800.0;
    sum = sum * r + 1.0 / 3628800.0;
    sum = sum * r + 1.0 / 362880.0;
    sum = sum * r + 1.0 / 40320.0;
    sum = sum * r + 1.0 / 5040.0;
    sum = sum * r + 1.0 / 720.0;
    sum = sum * r + 1.0 / 120.0;
    sum = sum * r + 1.0 / 24.0;
    sum = sum * r + 1.0 / 6.0;
    sum = sum * r + 0.5;
    sum = sum * r + 1.0;
    sum = sum * r + 1.0;
    return sum * (wide)power;
}

/* One head of keys: `count` queries from `first` on, a constant where this is inlined. */
static inline __attribute__((always_inline)) void attend_queries(
    const Call *call, int64_t row, int64_t head, int64_t first, const int count) {
    const int64_t size = call->size, place = (row * call->heads + head) * call->queries + first;
    const uint16_t *k = call->k + row * call->k_row + head * call->k_head;
    const uint16_t *v = call->v + row * call->v_row + head * call->v_head;
    const double *q = call->q + place * size;
    double sums[QUERIES][MOST_D], scores[QUERIES][KEYS];
    double most[QUERIES], weight[QUERIES];
    for (int s = 0; s < count; s++) {
        memset(sums[s], 0, size * sizeof(double));
        most[s] = -INFINITY, weight[s] = 0;
    }
    for (int64_t start = 0; start < call->keys; start += KEYS) {
        const int64_t keys = call->keys - start < KEYS ? call->keys - start : KEYS;
        const double *bias[QUERIES];
        int64_t begin = 0, end = keys;
        if (call->bias) {
            /* Keys that no query sees are skipped at both ends. */
            begin = keys, end = 0;
            for (int s = 0; s < count; s++) {
                bias[s] = call->bias + row * call->bias_row + (first + s) * call->bias_query + start;
                int64_t low = 0, high = keys;
                while (low < keys && bias[s][low] == -INFINITY) low++;
                while (high > low && bias[s][high - 1] == -INFINITY) high--;
                if (low < high) begin = low < begin ? low : begin, end = high > end ? high : end;
            }
        }
        if (begin >= end) continue;
        int64_t t = begin;
        for (; t + 2 <= end; t += 2) {
            const uint16_t *key = k + (start + t) * call->k_key;
            wide left[QUERIES], right[QUERIES];
            for (int s = 0; s < count; s++) left[s] = right[s] = (wide){0};
            for (int64_t d = 0; d < size; d += LANES) {
                const wide one = widened(key + d), two = widened(key + call->k_key + d);
                for (int s = 0; s < count; s++) {
                    left[s] += load(q + s * size + d) * one;
                    right[s] += load(q + s * size + d) * two;
                }
            }
            for (int s = 0; s < count; s++) {
                scores[s][t] = total(left[s]);
                scores[s][t + 1] = total(right[s]);
            }
        }
        if (t < end) {
            const uint16_t *key = k + (start + t) * call->k_key;
            for (int s = 0; s < count; s++) {
                wide found = {0};
                for (int64_t d = 0; d < size; d += LANES)
                    found += load(q + s * size + d) * widened(key + d);
                scores[s][t] = total(found);
            }
        }
        if (call->bias)
            for (int s = 0; s < count; s++)
                for (t = begin; t < end; t++) scores[s][t] += bias[s][t];
        for (int s = 0; s < count; s++) {
            double peak = most[s];
            for (t = begin; t < end; t++) peak = scores[s][t] > peak ? scores[s][t] : peak;
            if (peak == -INFINITY) {
                memset(scores[s] + begin, 0, (end - begin) * sizeof(double));
                continue;
            }
            if (peak > most[s]) {
                const double kept = most[s] == -INFINITY ? 0 : exp(most[s] - peak);
                weight[s] *= kept;
                for (int64_t d = 0; d < size; d += LANES)
                    store(sums[s] + d, load(sums[s] + d) * kept);
            }
            wide added = {0};
            for (t = begin; t + LANES <= end; t += LANES) {
                const wide share = exponential(load(scores[s] + t) - peak);
                store(scores[s] + t, share);
                added += share;
            }
            for (; t < end; t++) {
                const double share = exponential((wide){0} + scores[s][t] - peak)[0];
                scores[s][t] = share;
                added[0] += share;
            }
            weight[s] += total(added);
            most[s] = peak;
        }
        for (t = begin; t + 4 <= end; t += 4) {
            const uint16_t *value = v + (start + t) * call->v_key;
            for (int64_t d = 0; d < size; d += LANES) {
                const wide one = widened(value + d), two = widened(value + call->v_key + d);
                const wide three = widened(value + 2 * call->v_key + d);
                const wide four = widened(value + 3 * call->v_key + d);
                for (int s = 0; s < count; s++) {
                    wide sum = load(sums[s] + d) + one * scores[s][t];
                    sum += two * scores[s][t + 1];
                    sum += three * scores[s][t + 2];
                    store(sums[s] + d, sum + four * scores[s][t + 3]);
                }
            }
        }
        for (; t < end; t++) {
            const uint16_t *value = v + (start + t) * call->v_key;
            for (int64_t d = 0; d < size; d += LANES) {
                const wide part = widened(value + d);
                for (int s = 0; s < count; s++)
                    store(sums[s] + d, load(sums[s] + d) + part * scores[s][t]);
            }
        }
    }
    for (int s = 0; s < count; s++) {
        double *out = call->out + (place + s) * size;
        for (int64_t d = 0; d < size; d += LANES) store(out + d, load(sums[s] + d) / weight[s]);
        call->lse[place + s] = most[s] + log(weight[s]);
    }
}

static void attend_head(const Call *call, int64_t number) {
    const int64_t row = number / call->heads, head = number % call->heads;
    int64_t first = 0;
    for (; call->queries - first >= 6; first += 6) attend_queries(call, row, head, first, 6);
    switch (call->queries - first) {
        case 5: attend_queries(call, row, head, first, 5); break;
        case 4: attend_queries(call, row, head, first, 4); break;
        case 3: attend_queries(call, row, head, first, 3); break;
        case 2: attend_queries(call, row, head, first, 2); break;
        case 1: attend_queries(call, row, head, first, 1); break;
    }
}

typedef struct {
    const Call *call;
    int64_t first, last;
} Part;

static void *attend_part(void *given) {
    const Part *part = given;
    for (int64_t number = part->first; number < part->last; number++)
        attend_head(part->call, number);
    return 0;
}

/* Returns 0, or 1 for a size that this code does not take. */
int forge_attend(const Call *call, int64_t threads) {
    const int64_t heads = call->rows * call->heads;
    if (call->size > MOST_D || call->size % LANES) return 1;
    if (threads > heads) threads = heads;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    Part parts[MOST_THREADS];
    pthread_t running[MOST_THREADS];
    int64_t started = 1;
    for (int64_t n = 0; n < threads; n++)
        parts[n] = (Part){call, heads * n / threads, heads * (n + 1) / threads};
    for (; started < threads; started++)
        if (pthread_create(&running[started], 0, attend_part, &parts[started])) break;
    for (int64_t n = started; n < threads; n++) attend_part(&parts[n]);
    if (threads > 0) attend_part(&parts[0]);
    for (int64_t n = 1; n < started; n++) pthread_join(running[n], 0);
    return 0;
}
