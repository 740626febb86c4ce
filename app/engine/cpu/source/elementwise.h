// Elementwise and row-wise operations: activations, norms, rotary positions.
#pragma once

#include <cmath>

#include "vectors.h"

namespace ink {

enum Activation : int32_t { kNone, kRelu, kGelu, kGeluTanh, kSilu };

// 1 - erfc by Abramowitz and Stegun 7.1.26, error below 1.5e-7.
inline Floats erf(Floats x) {
    const Floats size = x < 0.0f ? -x : x;
    const Floats t = 1.0f / fma(size, splat(0.3275911f), splat(1.0f));
    Floats p = splat(1.061405429f);
    for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, splat(c));
    const Floats y = 1.0f - p * t * exp(-size * size);
    return x < 0.0f ? -y : y;
}

inline Floats activate(int32_t kind, Floats x) {
    switch (kind) {
        case kRelu: return x < 0.0f ? Floats{} : x;
        case kGelu: return 0.5f * x * (1.0f + erf(x * 0.70710678f));
        case kGeluTanh: return x / (1.0f + exp(x * -1.59576912f * fma(x * x, splat(0.044715f), splat(1.0f))));
        case kSilu: return x / (1.0f + exp(-x));
        default: return x;
    }
}

enum Norm : int32_t { kCopy, kRms, kLayer };

// Calls store_vector(column, 16 numbers) for the normed row. Rows and weights are padded with zeros to whole vectors.
template <class Store>
void norm(int32_t kind, const float* x, int width, const float* weight, const float* bias, float eps,
          Store&& store_vector) {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float mean = 0, factor = 1;
    if (kind == kLayer) {
        Floats total = {};
        for (int c = 0; c < width; c += kLanes) total += load<Floats>(x + c);
        mean = sum(total) / width;
    }
    if (kind != kCopy) {
        Floats squares = {};
        for (int c = 0; c < width; c += kLanes) {
            const Floats centered = lanes + c < width ? load<Floats>(x + c) - mean : Floats{};
            squares = fma(centered, centered, squares);
        }
        factor = 1.0f / std::sqrt(sum(squares) / width + eps);
    }
    for (int c = 0; c < width; c += kLanes) {
        Floats y = load<Floats>(x + c);
        if (kind != kCopy) y = (y - mean) * factor * load<Floats>(weight + c);
        if (bias) y += load<Floats>(bias + c);
        store_vector(c, y);
    }
}

// Rotates the pairs (i, i + half) of one head. angles: `half` cosines, then `half` sines.
inline void rotate(float* head, const float* angles, int half) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Floats a = load<Floats>(head + i), b = load<Floats>(head + i + half);
        const Floats cosine = load<Floats>(angles + i), sine = load<Floats>(angles + i + half);
        store(head + i, a * cosine - b * sine);
        store(head + i + half, b * cosine + a * sine);
    }
    for (; i < half; i++) {
        const float a = head[i], b = head[i + half], cosine = angles[i], sine = angles[i + half];
        head[i] = a * cosine - b * sine;
        head[i + half] = b * cosine + a * sine;
    }
}

// x / root mean square * weight, for one head.
inline void norm_head(float* x, int width, const float* weight, float eps) {
    float squares = 0;
    for (int c = 0; c < width; c++) squares += x[c] * x[c];
    const float factor = 1.0f / std::sqrt(squares / width + eps);
    for (int c = 0; c < width; c++) x[c] *= factor * weight[c];
}

}  // namespace ink
