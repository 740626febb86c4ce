// Matrices whose columns share a scale and an offset in groups (model/packed_matrix.py): integers of 4 or 8 bits.
//
// A weight is scale * integer + offset, rounded once to float32, and once more to bfloat16 in products of bfloat16: the
// numbers of a dense matrix, which are computed while a product reads them. None of them is subnormal or infinite, as
// PackedMatrix.check() sees to it.
//
// Packed layout: panels of 32 outputs, each of which is one stream of memory:
//
//   for every 256 columns: [units], if scales are multiples of them
//       for every group of columns: [scales][offsets][codes]
//
// with 32 units, scales or offsets side by side, units of scales before units of offsets. How codes are ordered is up
// to the level of the CPU: a run of a few columns has all codes that one load can use.
//
// A format (GroupedFloats, GroupedPairs) says
//   Number, kStep, Operand, broadcast(), add()   as in formats.h
//   kBits, Codes     of a code; how codes are ordered and read
//   kScales          vectors of scales of a panel: see Group
//   weights()        a vector of weights of 16 outputs, one step
//   put()            stores them as products of many rows read them
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "interface.h"
#include "operands.h"
#include "threads.h"

namespace ink {

constexpr int kPanel = 2 * kLanes;
constexpr int kUnitColumns = 256;  // that share a unit

// In the order of ScaleKind in model/packed_matrix.py. Multiples are bytes, which multiply a unit in float16.
enum ScaleKind : int32_t { kFloat16Scales, kFloat32Scales, kMultiples };

// Where a code is in a run, in bytes and bits.
struct Place {
    int byte, shift;
};

// Codes of 8 bits are the integers. A run has one column of 32 outputs.
template <int BITS>
struct LaneCodes {
    static_assert(BITS == 8);
    static constexpr int kColumns = 1, kBytes = kPanel;
    struct Table {
        explicit Table(const int8_t*) {}
    };
    static Place place(int, int output) { return {output, 0}; }
    // Integers of a column of a run, for 16 outputs.
    INK_INLINE static Floats integers(const char* at, int, int vector, const Table&) {
        return widen(load(reinterpret_cast<const int8_t*>(at + vector * kLanes)));
    }
};

#if defined(__AVX512F__)
// The integers of 16 codes, which a permutation chooses by the lowest 4 bits of each lane.
struct FloatTable {
    Floats numbers;
    explicit FloatTable(const int8_t* table) : numbers(widen(load(table))) {}
    INK_INLINE Floats at(const Words& lanes) const {
        return by_parts([](auto lane, Part number) {
            return (Part)_mm512_permutexvar_ps((__m512i)lane, (__m512)number);
        }, lanes, numbers);
    }
};

// Codes of 4 bits. A run has 8 columns: a lane has those of one output.
template <>
struct LaneCodes<4> {
    static constexpr int kColumns = 8, kBytes = 4 * kPanel;
    using Table = FloatTable;
    static Place place(int column, int output) { return {4 * output + column / 2, column % 2 * 4}; }
    INK_INLINE static Floats integers(const char* at, int column, int vector, const Table& table) {
        return table.at(load(reinterpret_cast<const uint32_t*>(at) + vector * kLanes) >> uint32_t(4 * column));
    }
};
#else
// The integers of 16 codes in bfloat16, which holds them: their low bytes and their high bytes.
struct ByteTable {
    alignas(16) uint8_t low[16], high[16];
    explicit ByteTable(const int8_t* table) {
        for (int code = 0; code < 16; code++) {
            const uint32_t number = bits<uint32_t>(float(table[code]));
            low[code] = uint8_t(number >> 16), high[code] = uint8_t(number >> 24);
        }
    }
};

// Codes of 4 bits. A run has 2 columns of 32 outputs: a byte has those of one output.
template <>
struct LaneCodes<4> {
    static constexpr int kColumns = 2, kBytes = kPanel;
    using Table = ByteTable;
#if defined(__AVX2__)
    // Instructions that interleave bytes work in halves of a register: see integers().
    static Place place(int column, int output) {
        return {output % 8 / 4 * 16 + output / 8 * 4 + output % 4, column * 4};
    }
    INK_INLINE static Floats integers(const char* at, int column, int vector, const Table& table) {
        const auto in_halves = [](const uint8_t* bytes) {
            return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
        };
        const __m256i run = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        const __m256i codes = _mm256_and_si256(column ? _mm256_srli_epi16(run, 4) : run, _mm256_set1_epi8(15));
        const __m256i low = _mm256_shuffle_epi8(in_halves(table.low), codes);
        const __m256i high = _mm256_shuffle_epi8(in_halves(table.high), codes);
        const __m256i pairs = vector ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
        Floats numbers;
        numbers.part[0] = (Part)_mm256_unpacklo_epi16(_mm256_setzero_si256(), pairs);
        numbers.part[1] = (Part)_mm256_unpackhi_epi16(_mm256_setzero_si256(), pairs);
        return numbers;
    }
#else
    static Place place(int column, int output) { return {output, column * 4}; }
    INK_INLINE static Floats integers(const char* at, int column, int vector, const Table& table) {
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(at) + vector * kLanes;
        Floats numbers;
#if defined(__ARM_NEON)
        const uint8x16_t run = vld1q_u8(bytes);
        const uint8x16_t codes = column ? vshrq_n_u8(run, 4) : vandq_u8(run, vdupq_n_u8(15));
        const uint8x16_t low = vqtbl1q_u8(vld1q_u8(table.low), codes), high = vqtbl1q_u8(vld1q_u8(table.high), codes);
        const uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(low, high));
        const uint16x8_t second = vreinterpretq_u16_u8(vzip2q_u8(low, high));
        numbers.part[0] = (Part)vshll_n_u16(vget_low_u16(first), 16);
        numbers.part[1] = (Part)vshll_high_n_u16(first, 16);
        numbers.part[2] = (Part)vshll_n_u16(vget_low_u16(second), 16);
        numbers.part[3] = (Part)vshll_high_n_u16(second, 16);
#else
        for (int lane = 0; lane < kLanes; lane++) {
            const int code = bytes[lane] >> (4 * column) & 15;
            const uint32_t number = uint32_t(table.high[code]) << 24 | uint32_t(table.low[code]) << 16;
            numbers.part[lane / kPart][lane % kPart] = bits<float>(number);
        }
#endif
        return numbers;
    }
#endif
};
#endif

// Whether offsets have the first integer, and codes are from 0 on.
template <class Codes>
constexpr bool kFirstInOffsets = false;

#if defined(__AVX2__) && !defined(__AVX512F__)
// Codes of 4 bits whose integers are consecutive: converting codes is faster than looking up both bytes of a number.
// Offsets have the first integer, so the sum that is rounded is the same; only -0 becomes 0, which changes no product's
// sum. A run has 2 columns of 32 outputs: a byte has those of one output.
struct ConsecutiveCodes {
    static constexpr int kColumns = 2, kBytes = kPanel;
    using Table = LaneCodes<8>::Table;  // none
    static Place place(int column, int output) { return {output, column * 4}; }
    INK_INLINE static Floats integers(const char* at, int column, int vector, const Table&) {
        Floats codes;
        for_each_part([&](int i) {
            const auto* outputs = reinterpret_cast<const __m128i*>(at + vector * kLanes + i * kPart);
            const __m256i run = _mm256_cvtepu8_epi32(_mm_loadl_epi64(outputs));
            const __m256i code = column ? _mm256_srli_epi32(run, 4) : _mm256_and_si256(run, _mm256_set1_epi32(15));
            codes.part[i] = (Part)_mm256_cvtepi32_ps(code);
        });
        return codes;
    }
};
template <>
constexpr bool kFirstInOffsets<ConsecutiveCodes> = true;
#else
using ConsecutiveCodes = LaneCodes<4>;  // looking up is as fast
#endif

// Whether ConsecutiveCodes can read a matrix: offsets hold the first integer exactly. A scale has up to 19 bits.
inline bool are_consecutive(const InkMatrix& m) {
    for (int code = 1; code < 16; code++)
        if (m.table[code] != m.table[0] + code) return false;
    return m.table[0] == 0 || (!m.has_offsets && m.table[0] >= -31 && m.table[0] <= 31);
}

// Codes::integers() of a column behind `at`, where a run begins.
template <class Codes>
INK_INLINE Floats integers_of(const char* at, int column, int vector, const typename Codes::Table& table) {
    return Codes::integers(at + column / Codes::kColumns * Codes::kBytes, column % Codes::kColumns, vector, table);
}

// Scales and offsets of a group: of 16 outputs, or with N = 4 of 8 outputs, each of them in two lanes.
template <int N>
struct Group {
    Floats scales[N], offsets[N];
};

template <int BITS>
constexpr const char* kGroupedName = BITS == 4 ? "packed4" : "packed8";

template <int BITS, class CODES = LaneCodes<BITS>>
struct GroupedFloats : FloatSteps {
    static constexpr const char* kName = kGroupedName<BITS>;
    static constexpr int kBits = BITS, kScales = 2;
    using Codes = CODES;
    using OfConsecutive = GroupedFloats<BITS, std::conditional_t<BITS == 4, ConsecutiveCodes, CODES>>;
    INK_INLINE static Floats weights(const char* at, int column, int vector, const typename Codes::Table& table,
                                     const Group<kScales>& group) {
        return fma(integers_of<Codes>(at, column, vector, table), group.scales[vector], group.offsets[vector]);
    }
    INK_INLINE static void put(char* to, const Floats& weights) { store(reinterpret_cast<float*>(to), weights); }
    static constexpr int kPutBytes = 64;
};

#if defined(__AVX512BF16__)
// Pairs of columns in which 8 outputs are side by side: both halves are rounded to 16 pairs in one instruction.
template <int BITS>
struct PairCodes {
    static_assert(BITS == 8);
    static constexpr int kColumns = 2, kBytes = 2 * kPanel;
    using Table = typename LaneCodes<8>::Table;
    static Place place(int column, int output) { return {2 * output + column, 0}; }
    // Integers of a pair of columns of a run, for 8 outputs.
    INK_INLINE static Floats integers(const char* at, int, int eighth, const Table&) {
        return widen(load(reinterpret_cast<const int8_t*>(at + eighth * kLanes)));
    }
};

// A run has 16 columns: a lane has the even ones of an output, the next lane the odd ones.
template <>
struct PairCodes<4> {
    static constexpr int kColumns = 16, kBytes = 8 * kPanel;
    using Table = FloatTable;
    static Place place(int column, int output) { return {8 * output + column % 2 * 4 + column / 4, column / 2 % 2 * 4}; }
    INK_INLINE static Floats integers(const char* at, int column, int eighth, const Table& table) {
        return table.at(load(reinterpret_cast<const uint32_t*>(at) + eighth * kLanes) >> uint32_t(2 * column));
    }
};

template <int BITS>
struct GroupedPairs : PairSteps {
    static constexpr const char* kName = kGroupedName<BITS>;
    static constexpr int kBits = BITS, kScales = 4;
    using Codes = PairCodes<BITS>;
    using OfConsecutive = GroupedPairs;
    INK_INLINE static Words weights(const char* at, int column, int vector, const typename Codes::Table& table,
                                    const Group<kScales>& group) {
        const auto eighth = [&](int i) {
            return fma(integers_of<Codes>(at, column, i, table), group.scales[i], group.offsets[i]);
        };
        return by_parts([](Part first, Part second) {
            return (PartOf<uint32_t>)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        }, eighth(2 * vector), eighth(2 * vector + 1));
    }
    INK_INLINE static void put(char* to, const Words& weights) { store(reinterpret_cast<uint32_t*>(to), weights); }
    static constexpr int kPutBytes = 64;
};
#else
// Numbers that are finite, rounded to bfloat16.
INK_INLINE Floats rounded_to_bf16(const Floats& x) {
    return by_parts([](Part part) {
        const auto u = (PartOf<uint32_t>)part;
        return (Part)((u + 0x7fffu + (u >> 16 & 1)) & 0xffff0000u);
    }, x);
}

// Numbers of bfloat16 are computed in float32, the second one of a pair first: the bits of dot_pairs().
template <int BITS, class CODES = LaneCodes<BITS>>
struct GroupedPairs {
    static constexpr const char* kName = kGroupedName<BITS>;
    static constexpr int kBits = BITS, kScales = 2, kStep = 2;
    using Number = bf16;
    using Codes = CODES;
    using OfConsecutive = GroupedPairs<BITS, std::conditional_t<BITS == 4, ConsecutiveCodes, CODES>>;
    struct Operand {
        Floats first, second;
    };
    INK_INLINE static Operand broadcast(const Number* x) { return {to_float(x[0]), to_float(x[1])}; }
    INK_INLINE static Floats add(const Operand& w, const Operand& x, const Floats& sum) {
        return fma(w.first, x.first, fma(w.second, x.second, sum));
    }
    INK_INLINE static Operand weights(const char* at, int column, int vector, const typename Codes::Table& table,
                                      const Group<kScales>& group) {
        const auto of = [&](int i) {
            const Floats integers = integers_of<Codes>(at, column + i, vector, table);
            return rounded_to_bf16(fma(integers, group.scales[vector], group.offsets[vector]));
        };
        return {of(0), of(1)};
    }
#if defined(__AVX512F__)
    INK_INLINE static void put(char* to, const Operand& weights) {
        store(reinterpret_cast<uint32_t*>(to), bits<uint32_t>(weights.first) >> 16 | bits<uint32_t>(weights.second));
    }
    static constexpr int kPutBytes = 64;
#else
    INK_INLINE static void put(char* to, const Operand& weights) {
        store(reinterpret_cast<float*>(to), weights.first), store(reinterpret_cast<float*>(to) + kLanes, weights.second);
    }
    static constexpr int kPutBytes = 128;
#endif
};
#endif

template <class W>
concept IsGrouped = requires { W::kBits; };

// f(W with the codes of this matrix).
template <IsGrouped W, class F>
auto with_codes(const InkMatrix& m, F&& f) {
    using OfConsecutive = typename W::OfConsecutive;
    if constexpr (!std::is_same_v<OfConsecutive, W>)
        if (are_consecutive(m)) return f(OfConsecutive());
    return f(W());
}

// Columns that a loop takes at once: whole runs and whole steps.
template <class W>
constexpr int kRunColumns = std::max(W::Codes::kColumns, 4);

// Bytes of the parts of a panel.
struct GroupLayout {
    explicit GroupLayout(const InkMatrix& m, int bits)
        : group(m.group), number(m.scales == kFloat16Scales ? 2 : m.scales == kFloat32Scales ? 4 : 1),
          units(m.scales == kMultiples ? 2 * kPanel * (1 + m.has_offsets) : 0),
          head(number * kPanel * (1 + m.has_offsets)), codes(m.group * kPanel * bits / 8) {}
    int group, number, units, head, codes;  // number: one scale; head: what is in front of the codes of a group

    // From the beginning of a panel to the units of a column, and to the head of its group.
    long to_units(int column) const {
        return long(column / kUnitColumns) * (units + kUnitColumns / group * (head + codes));
    }
    long to_head(int column) const {
        return to_units(column) + units + long(column % kUnitColumns / group) * (head + codes);
    }
    long panel_bytes(int columns) const {
        const int whole = columns / kUnitColumns * kUnitColumns, rest = columns - whole;
        const long bytes = to_units(whole) + (rest ? units + long(rest / group) * (head + codes) : 0);
        return (bytes + 63) / 64 * 64;
    }
};

template <IsGrouped W>
long grouped_panel_bytes(const InkMatrix& m) {
    return GroupLayout(m, W::kBits).panel_bytes(m.steps * W::kStep);
}

// Reads a panel from its first column on.
template <IsGrouped W>
class GroupReader {
    using Codes = typename W::Codes;

  public:
    INK_INLINE GroupReader(const InkMatrix& m, const char* panel)
        : layout_(m, W::kBits), kind_(m.scales), has_offsets_(m.has_offsets), first_(m.table[0]), table_(m.table),
          at_(panel) {
        for (int i = 0; i < 2; i++) have_sign_[i] = m.have_sign && m.have_sign[i] != 0;
    }

    // Calls f(first column, weights of 32 outputs) for every step of the next columns, which are whole groups.
    template <class F>
    INK_INLINE void for_each_step(int columns, F&& f) {
        for (const int end = column_ + columns; column_ < end;) {
            Group<W::kScales> group;
            read_head(group);
            for (const int last = column_ + layout_.group; column_ < last; column_ += kRunColumns<W>) {
                constexpr int kBytes = kRunColumns<W> / Codes::kColumns * Codes::kBytes;
                prefetch(kBytes);
#pragma GCC unroll 8
                for (int column = 0; column < kRunColumns<W>; column += W::kStep) {
                    const typename W::Operand w[2] = {W::weights(at_, column, 0, table_, group),
                                                      W::weights(at_, column, 1, table_, group)};
                    f(column_ + column, w);
                }
                at_ += kBytes;
            }
        }
    }

    // Writes the weights of the next columns.
    INK_INLINE void convert(int columns, char* to) {
        for_each_step(columns, [&](int, const typename W::Operand* w) {
            W::put(to, w[0]), W::put(to + W::kPutBytes, w[1]);
            to += 2 * W::kPutBytes;
        });
    }

  private:
    INK_INLINE void prefetch(int bytes) const {
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at_ + i + 4096);
    }

    INK_INLINE void read_head(Group<W::kScales>& group) {
        if (layout_.units && column_ % kUnitColumns == 0) {
            read_units(units_[0]);
            if (has_offsets_) read_units(units_[1]);
        }
        prefetch(layout_.head);
        read_numbers(units_[0], have_sign_[0], group.scales);
        if (has_offsets_) return read_numbers(units_[1], have_sign_[1], group.offsets);
        for (int i = 0; i < W::kScales; i++)
            if constexpr (kFirstInOffsets<Codes>) group.offsets[i] = group.scales[i] * first_;
            else group.offsets[i] = -0.0f;  // changes no product
    }

    INK_INLINE void read_units(Floats* units) {
        for (int i = 0; i < 2; i++) units[i] = from_f16(load(reinterpret_cast<const uint16_t*>(at_) + i * kLanes));
        at_ += 2 * kPanel;
    }

    INK_INLINE void read_numbers(const Floats* units, bool have_sign, Floats* to) {
        Floats numbers[2];
        for (int i = 0; i < 2; i++) {
            if (kind_ == kFloat16Scales) {
                numbers[i] = from_f16(load(reinterpret_cast<const uint16_t*>(at_) + i * kLanes));
            } else if (kind_ == kFloat32Scales) {
                numbers[i] = load(reinterpret_cast<const float*>(at_) + i * kLanes);
            } else {
                const char* bytes = at_ + i * kLanes;
                numbers[i] = units[i] * (have_sign ? widen(load(reinterpret_cast<const int8_t*>(bytes)))
                                                   : widen(load(reinterpret_cast<const uint8_t*>(bytes))));
            }
        }
        at_ += layout_.number * kPanel;
        if constexpr (W::kScales == 2) to[0] = numbers[0], to[1] = numbers[1];
#if defined(__AVX512F__)
        else for (int i = 0; i < 4; i++) to[i] = each_twice(numbers[i / 2], i % 2 * 8);
#endif
    }

#if defined(__AVX512F__)
    // Lanes from `first` on, each of them in two lanes.
    INK_INLINE static Floats each_twice(const Floats& x, int first) {
        const Ints lanes = (consecutive(0) >> 1) + first;
        return by_parts([](Part part, auto lane) {
            return (Part)_mm512_permutexvar_ps((__m512i)lane, (__m512)part);
        }, x, lanes);
    }
#endif

    const GroupLayout layout_;
    const int kind_, has_offsets_;
    const float first_;  // integer of the table
    const typename Codes::Table table_;
    const char* at_;
    int column_ = 0;
    bool have_sign_[2];  // multiples of scales, of offsets
    Floats units_[2][2] = {};
};

inline float scalar_from_f16(const void* from) {
    Vector<uint16_t> one = uint16_t(0);
    std::memcpy(&one, from, sizeof(uint16_t));
    return from_f16(one)[0];
}

// The number that one output has in one column, in float32, without vectors: rows of the embedding.
template <IsGrouped W>
float grouped_number(const InkMatrix& m, const GroupLayout& layout, const char* panel, int column, int output) {
    using Codes = typename W::Codes;
    const char *units = panel + layout.to_units(column), *head = panel + layout.to_head(column);
    const auto scale = [&](int i) {
        const char* at = head + (i * kPanel + output) * layout.number;
        if (m.scales == kFloat16Scales) return scalar_from_f16(at);
        float number;
        if (m.scales == kFloat32Scales) return std::memcpy(&number, at, sizeof number), number;
        number = m.have_sign[i] != 0 ? float(int8_t(*at)) : float(uint8_t(*at));
        return number * scalar_from_f16(units + (i * kPanel + output) * sizeof(uint16_t));
    };
    const int of_group = column % m.group;
    const Place place = Codes::place(of_group % Codes::kColumns, output);
    const int byte = head[layout.head + of_group / Codes::kColumns * Codes::kBytes + place.byte];
    const int integer = W::kBits == 8 ? int8_t(byte) : m.table[byte >> place.shift & 15];
    const float number = __builtin_fmaf(float(integer), scale(0), m.has_offsets ? scale(1) : -0.0f);
    if constexpr (W::kStep == 1) return number;
    else return from_bf16(to_bf16(Floats(number)))[0];
}

// Copies a matrix [n_rows, columns] into the panels of `m`. source_row(panel, output): n_rows or more for padding.
template <IsGrouped W, class F>
void pack_groups(Pool& pool, const InkGroups& from, int n_rows, const InkMatrix& m, F source_row) {
    using Codes = typename W::Codes;
    const int columns = m.steps * W::kStep, groups = columns / m.group;
    const GroupLayout layout(m, W::kBits);
    const long bytes = layout.panel_bytes(columns), row_units = (columns + kUnitColumns - 1) / kUnitColumns;
    pool.run(m.outputs / kPanel, [&](int panel, int) {
        char* start = static_cast<char*>(const_cast<void*>(m.packed)) + panel * bytes;
        std::fill(start, start + bytes, 0);
        const auto copy_numbers = [&](int row, int output, int i, const void* numbers, const uint16_t* units) {
            const char* of_row = static_cast<const char*>(numbers) + long(row) * groups * layout.number;
            for (int g = 0; g < groups; g++)
                std::memcpy(start + layout.to_head(g * m.group) + (i * kPanel + output) * layout.number,
                            of_row + g * layout.number, layout.number);
            for (int u = 0; layout.units && u < row_units; u++)
                std::memcpy(start + layout.to_units(u * kUnitColumns) + (i * kPanel + output) * sizeof *units,
                            units + row * row_units + u, sizeof *units);
        };
        for (int output = 0; output < kPanel; output++) {
            const int row = source_row(panel, output);
            if (row >= n_rows) continue;
            copy_numbers(row, output, 0, from.scales, from.scale_units);
            if (m.has_offsets) copy_numbers(row, output, 1, from.offsets, from.offset_units);
        }
        // Group by group, which stays in the L1 cache.
        for (int g = 0; g < groups; g++) {
            char* codes = start + layout.to_head(g * m.group) + layout.head;
            for (int output = 0; output < kPanel; output++) {
                const int row = source_row(panel, output);
                if (row >= n_rows) continue;
                const uint8_t* of_row = from.codes + (long(row) * columns + g * m.group) * W::kBits / 8;
                for (int i = 0; i < m.group; i++) {
                    const int code = W::kBits == 8 ? of_row[i] : of_row[i / 2] >> (i % 2 * 4) & 15;
                    const Place place = Codes::place(i % Codes::kColumns, output);
                    codes[i / Codes::kColumns * Codes::kBytes + place.byte] |= char(code << place.shift);
                }
            }
        }
    });
}

}  // namespace ink
