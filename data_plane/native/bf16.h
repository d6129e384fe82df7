// The upper half of an fp32, and what both kinds of vectors include.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

struct bf16 {
    uint16_t bits;
};

// How weights of type W are multiplied with fp32 or bf16 factors (linear.h).
template <class Factor, class W>
struct Products;

static inline float to_float(float value) { return value; }

static inline float to_float(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

static inline void set(float& to, float value) { to = value; }

// To the nearest, ties to even.
static inline void set(bf16& to, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    to.bits = uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
