// Elementwise and row-wise operations: activations, norms, rotary positions.
#pragma once

#include <cmath>

#include "vectors.h"

namespace ink {

// In the order of Activation in model/config.py.
enum Activation : int32_t { kNone, kRelu, kGelu, kGeluTanh, kSilu, kRelu2, kXielu, kSwigluClamped };

// 1 - erfc by Abramowitz and Stegun 7.1.26, error below 1.5e-7.
INK_INLINE Part erf(Part x) {
    const Part size = x < 0.0f ? -x : x;
    const Part t = 1.0f / fma(size, 0.3275911f - Part{}, 1.0f - Part{});
    const Part p = polynomial(t, 1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f);
    const Part y = 1.0f - p * t * exp(-size * size);
    return x < 0.0f ? -y : y;
}

// With an absolute error of 2e-7, and without one near -1 and 1, where logits under a soft cap are told apart by their
// last bits. That of C libraries rounds otherwise on every machine.
INK_INLINE Floats tanh(const Floats& x) {
    return by_parts([](Part part) {
        const Part y = 1.0f - 2.0f / (1.0f + exp((part < 0.0f ? -part : part) * 2.0f));
        return part < 0.0f ? -y : y;
    }, x);
}

// parameters: of xIELU, the curvature right and left of 0.
INK_INLINE Part activate(int32_t kind, Part x, const float* parameters) {
    switch (kind) {
        case kRelu: return x < 0.0f ? Part{} : x;
        case kGelu: return 0.5f * x * (1.0f + erf(x * 0.70710678f));
        case kGeluTanh: return x / (1.0f + exp(x * -1.59576912f * fma(x * x, 0.044715f - Part{}, 1.0f - Part{})));
        case kSilu: return x / (1.0f + exp(-x));
        case kRelu2: return x < 0.0f ? Part{} : x * x;
        case kXielu: {
            const Part left = (exp(x < 0.0f ? x : Part{}) - 1.0f - x) * parameters[1];
            return (x > 0.0f ? parameters[0] * x * x : left) + 0.5f * x;
        }
        default: return x;
    }
}

INK_INLINE Floats activate(int32_t kind, const Floats& x, const float* parameters) {
    return by_parts([=](Part part) { return activate(kind, part, parameters); }, x);
}

constexpr float kSwigluLimit = 7.0f, kSwigluSlope = 1.702f;

// What a gated feed-forward makes of gate and up.
INK_INLINE Floats activate_gated(int32_t kind, const Floats& gate, const Floats& up, const float* parameters) {
    if (kind != kSwigluClamped) return activate(kind, gate, parameters) * up;
    return by_parts([](Part g, Part u) {
        const Part limit = kSwigluLimit - Part{};
        g = g > limit ? limit : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
        return (u + 1.0f) * (g / (1.0f + exp(g * -kSwigluSlope)));
    }, gate, up);
}

enum Norm : int32_t { kCopy, kRms, kLayer };

// Calls store_vector(column, 16 numbers) for the normed row. Rows and weights are padded with zeros to whole vectors.
template <class Store>
void norm(int32_t kind, const float* x, int width, const float* weight, const float* bias, float eps,
          Store&& store_vector) {
    float mean = 0, factor = 1;
    if (kind == kLayer) {
        Floats total = {};
        for (int c = 0; c < width; c += kLanes) total += load(x + c);
        mean = sum(total) / width;
    }
    if (kind != kCopy) {
        Floats squares = {};
        for (int c = 0; c < width; c += kLanes) {
            const Floats centered = first_lanes(width - c, load(x + c) - mean, Floats{});
            squares = fma(centered, centered, squares);
        }
        factor = 1.0f / std::sqrt(sum(squares) / width + eps);
    }
    for (int c = 0; c < width; c += kLanes) {
        Floats y = load(x + c);
        if (kind != kCopy) y = (y - mean) * factor * load(weight + c);
        if (bias) y += load(bias + c);
        store_vector(c, y);
    }
}

// Rotates the pairs (i, i + half) of one head. angles: `half` cosines, then `half` sines.
inline void rotate(float* head, const float* angles, int half) {
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half], cosine = angles[i], sine = angles[i + half];
        head[i] = a * cosine - b * sine;
        head[i + half] = b * cosine + a * sine;
    }
}

// x / root mean square * weight, for all heads of a row together.
inline void norm_heads_together(float* x, int size, const float* weight, float eps) {
    const int whole = size / kLanes * kLanes;
    Floats parts = {};
    for (int c = 0; c < whole; c += kLanes) parts = fma(load(x + c), load(x + c), parts);
    float squares = sum(parts);
    for (int c = whole; c < size; c++) squares += x[c] * x[c];
    const float factor = 1.0f / std::sqrt(squares / size + eps);
    for (int c = 0; c < whole; c += kLanes) store(x + c, load(x + c) * factor * load(weight + c));
    for (int c = whole; c < size; c++) x[c] *= factor * weight[c];
}

// x / root mean square * weight, for one head.
inline void norm_head(float* x, int width, const float* weight, float eps) {
    float squares = 0;
    for (int c = 0; c < width; c++) squares += x[c] * x[c];
    const float factor = 1.0f / std::sqrt(squares / width + eps);
    for (int c = 0; c < width; c++) x[c] *= factor * weight[c];
}

}  // namespace ink
