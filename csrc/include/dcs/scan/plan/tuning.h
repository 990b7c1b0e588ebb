// What the scans' kernels are made for: warps of blocks, vectors of lanes, tiles kept in shared memory. Measured on an
// H200.
#pragma once

#include <cstdint>

namespace dcs {

constexpr int kTileWarps = 8;
constexpr int kHalfWarpSteps = 32;  // of a thread where half a warp takes a segment of time
constexpr int kPairWarps = 4;       // of a block of pairs of columns
constexpr int kMaxCluster = 16;
constexpr int kBlockChunks = 5;

// Few rows that wait for nobody (long_rows/few_rows.cuh, long_rows/few_rows_gated.cuh): clusters of a row, warps of a
// block.
constexpr int kFewRowsClusters = 8;
constexpr int kFewRowsWarps = 8;
constexpr int64_t kDirectWindowLimit = 64;
constexpr int64_t kWindowWorkspace = int64_t{256} << 20;

// The row kernel (rows/tile_rows.cuh): vectors of a thread, whose registers bound how many blocks are in flight, and
// elements of a warp's segment.
constexpr int kRowChunks = 4;
inline int64_t warp_elements(int64_t bytes) { return 32 * (16 / bytes) * kRowChunks; }
// With a shared gamma: of a multiprocessor's bytes and of the segments of a row that are its own, at least. Below them
// the kernels of any shape take 0.66 to 1.0 of its time, above them 1.1 to 1.35 times as much.
constexpr int64_t kFewTileBytes = 6 << 10, kTilePercent = 70;

// The streaming kernel of devices with bulk copies (long_rows/bulk_stream.cuh), one block a multiprocessor.
struct BulkStreamSize {
  int warps, vectors, stages, ahead;
};
// Forward, the totals are known two tiles ahead, which leaves one or two tiles on their way; more of them make the
// totals late.
constexpr BulkStreamSize bulk_stream_size(int tensors, int64_t bytes, bool step, bool whole_rows = false) {
  if (tensors == 1) return {8, 11, 5, 2};
  if (whole_rows) return {16, 3, 4, 1};  // no block waits: more warps instead of tiles ahead
  if (tensors == 3) return bytes == 2 ? BulkStreamSize{12, 3, 4, 1} : BulkStreamSize{9, 3, 5, 2};
  if (step) return bytes == 2 ? BulkStreamSize{6, 7, 5, 2} : BulkStreamSize{5, 9, 5, 2};
  return {8, 5, 5, 2};
}

constexpr int kBulkStreamSpare = 8;  // vectors kept for a neighbor of the gates, and of saved output: a line of memory
constexpr int bulk_stream_shared_bytes(int tensors, int64_t bytes, bool step, bool whole_rows = false) {
  const BulkStreamSize size = bulk_stream_size(tensors, bytes, step, whole_rows);
  return size.stages * (32 * size.warps * size.vectors * tensors + kBulkStreamSpare * (tensors - 1)) * 16;
}
constexpr int kStepCopies = 4;  // of the statuses of tiles with a per-step gamma (long_rows/gated_lookback.cuh)
constexpr int64_t kFewStepBytes = int64_t{128}
    << 20;  // of a scan with a per-step gamma whose inputs make room in L2 first
constexpr double kMostFoldedGamma = 1.25;
// Scans that begin as the launch before them ends: elements, and blocks a multiprocessor, at most.
constexpr int64_t kMostDependentElements = int64_t{1} << 22, kDependentBlocks = 3;
constexpr int kMostBulkStreamBlocks = 160;    // a lane reads five totals
constexpr int kBulkStreamStaticBytes = 1152;  // beside them, at most

// Columns that a warp takes (columns/warp_columns.cuh): 8 or 4 bytes a lane, segments of 8 steps, as many on
// their way as an H200 wants.
constexpr int kWarpColumnsSteps = 8;
constexpr int warp_column_stages(int tensors, int64_t bytes) {
  return bytes == 2 ? (tensors == 1 ? 16 : tensors == 2 ? 12 : 6) : (tensors == 1 ? 8 : tensors == 2 ? 6 : 4);
}
constexpr int64_t kLongestFloatCarry = 4096;  // in half precision, carried in float

// Steps of block columns at most; of floats with a shared gamma. Beyond them resident columns take 0.7 to 1.0 of their
// time.
constexpr int64_t kLongestBlocks = 2048, kLongestFloatBlocks = 512;
// Of block columns that are too few to give every multiprocessor a block: steps that a block takes at once, in any
// case.
constexpr int64_t kLongestBlockPass = 512;
// Warps of a block of one column a lane, where there are more blocks than multiprocessors, so that two of them share
// one: with 32, long columns take 1.1 to 1.3 times as long.
constexpr int kSharedBlockWarps = 16;

// Few steps of a shared gamma, which serial columns take in 0.72 to 0.98 of the time of warps and blocks: steps; of
// half precision, the bytes of a step and multiprocessor from which and up to which they do.
constexpr int64_t kFewWarpSteps = 32, kFewStepColumns = 256, kManyStepColumns = 1024;
// Of floats, which they take in 0.70 to 0.94 of the time of blocks, of 48 to 59 steps in 1.05 to 1.23.
constexpr int64_t kFewBlockSteps = 46;

constexpr int64_t kFewColumnSteps = 16;  // that columns/few_steps.cuh and columns/serial_columns.cuh take

// Few columns (columns/split_columns.cuh): 32 of them a block, segments of 32 steps that a warp or half of one holds
// in registers.
constexpr int kSplitBlockColumns = 32;
constexpr int kSplitSteps = 32;
constexpr int kSplitSegments = 32;
// Of more steps, not with fewer blocks than such a share of the multiprocessors: resident columns take 0.9 of the time.
constexpr int64_t kLongestFewSplit = 512, kFewSplitShare = 8;
constexpr int split_shared_bytes(int64_t segments, int64_t bytes) {
  return static_cast<int>(segments) * kSplitBlockColumns * (2 * 8 + kSplitSteps * static_cast<int>(bytes));
}

// Rows that all blocks together hold on the chip (long_rows/resident.cuh): a block's warps, a warp's vectors a lane in
// shared memory (and one more in registers), and the rounds of them. Three KB of shared memory are left of an H200's.
constexpr int kResidentWarps = 16, kResidentVectors = 7, kResidentRounds = 4;
constexpr int kResidentPart = kResidentWarps * 32 * (kResidentVectors + 1);  // vectors of a block and round
constexpr int kResidentSharedBytes = kResidentRounds * kResidentWarps * 32 * kResidentVectors * 16;
constexpr int kMostResidentParts = 128;  // of a row: a lane reads four totals
constexpr int kResidentPercent = 85;     // of as many rounds as there are, that rows take at least

// Rows of any length and alignment (rows/flat.cuh): elements that a tile begins at a multiple of; vectors of a lane and
// warps of a block, at most and where rows are many and short; blocks of a multiprocessor that rows are spread over.
constexpr int kFlatGrain = 16;
constexpr int kFlatVectors = 7, kFlatWarps = 8, kFlatTileVectors = 5, kFlatTileWarps = 4;
constexpr int kFlatBlocks = 4;
constexpr int kMostRowCluster = 16;      // blocks of a row
constexpr int64_t kMostFlatCluster = 8;  // blocks of a row, where its lanes have fewer than all vectors
// Of rows of floats that are not flat, from which on each is copied by itself.
constexpr int64_t kLeastPartedSteps = 128;
// Small problems (rows/small_rows.cuh, columns/small_columns.cuh): warps of a block, which are also all that a
// multiprocessor has registers for, at most.
constexpr int kSmallBlockWarps = 32;
// Of rows: warps of a block of several at least and at most, and how many of these a multiprocessor has if there are
// enough.
constexpr int kFewestSmallWarps = 4, kMostSmallTileWarps = 16, kSmallBlocks = 2;
// Of rows in float (rows/float_rows.cuh): blocks of clusters a multiprocessor, at most. On an H200 clusters of up to
// three times as many blocks as multiprocessors take 0.76 of the other kernel's time, of five to six times 1.1.
constexpr int kMostFloatBlocks = 4;
// Multiprocessors of which a cluster's blocks are on some, at most 16: an H200 has groups of 16 and of 18.
constexpr int kClusterMultiprocessors = 18;
// Of those that blocks share (rows/long_rows.cuh): warps of a block beside the one that passes carries on (twelve in
// all leave a thread 168 registers), bytes that they leave each other; tiles whose totals a block knows before it
// finishes one, tiles in its shared memory, words of other blocks that a lane reads.
constexpr int kLongWarps = 11, kLongSharedBytes = 4 << 10;
constexpr int kLongAhead = 2, kFewestLongStages = kLongAhead + 2, kLongStages = 8;
// Carries of more bytes, complex numbers, are too rare for kernels of their own: a long row is one column
// (columns/resident_columns.cuh).
constexpr int64_t kMostLongBytes = 8;
// Vectors of a lane, by tensors read: as many as shared memory has room for in so many tiles.
constexpr int long_vectors(int tensors) { return tensors == 1 ? 7 : tensors == 2 ? 5 : 3; }
constexpr int kLongReads = 5, kLongBlocks = 32 * kLongReads;
// Where rows of one tensor lie apart (rows/apart_slice.cuh): bytes before a slice's place that it lands in, as many as
// a line of memory has.
constexpr int kLandingBytes = 128;

constexpr int64_t kSector = 32;  // bytes that memory is read by
// Small scans along a strided time (columns/small_columns.cuh): warps of a block where less will do than there can be;
// steps of a thread at once, and those up to which a block is no cluster; at most; columns of a block, at most. Of more
// steps, which too few blocks share, columns with words in global memory are faster on an H200.
constexpr int kUsualSmallColumnWarps = 16, kFewestSmallColumnWarps = 4;
constexpr int kMostSmallColumnBlocks = 16;  // of a multiprocessor; with sums and what is turned around, some wait
constexpr int kSmallBatch = 4, kMostLoneSteps = 8;
constexpr int small_column_steps(bool step, bool backward) { return step || backward ? 8 : 16; }
// Operands of a step.
constexpr int small_column_ranges(bool step, bool backward) { return 1 + (step ? 1 : 0) + (backward ? 1 : 0); }
constexpr int kSmallSpan = 16;
constexpr int kSmallLevels = 5;  // doublings from a lane to all of a warp, at most
constexpr int64_t kLongestSmallColumn = 16384;
// In float (columns/float_columns.cuh): blocks a multiprocessor of what comes before the kernels for aligned operands,
// of which 34 random problems take 0.66 of these kernels' time on an H200; of more blocks 40 take 1.14.
constexpr int64_t kMostFewColumnBlocks = 3;
// Blocks that leave each other words, at most: a lane of a warp reads five. Of up to so many columns, 60 random
// problems of 1e5 to 3e6 elements take 0.89 of resident columns' time on an H200; of more it was not measured.
constexpr int64_t kMostSmallSharers = 160, kMostSharedColumns = 48;
// Words of shared memory from a warp's step to the next; bytes of it that blocks have in any case, at most.
constexpr int kSmallPitch = 33, kSmallColumnsStatics = 20 << 10;
// Columns of few neighbors (columns/staged_columns.cuh): threads of a block; bytes of a column that are staged at a
// time, in one of two buffers. On an H200 they are 1.4 times as fast as the other kernels, in 42 random problems, where
// steps have less than so many bytes, which are no whole sectors, and there are so many steps, and columns a
// multiprocessor.
constexpr int kStagedThreads = 128, kStagedBytes = 128, kStagedBuffers = 2;
constexpr int64_t kMostStagedRow = 64, kFewestStagedSteps = 24, kStagedColumns = 288;
// Of fewer columns, in parts (columns/staged_parts.cuh): steps, and outer rows a multiprocessor, at least; threads of a
// block, at most and where columns are many; those that a multiprocessor has registers for at once; bytes of shared
// memory that each of these has for its part, with the next one; steps of a part, at least; times as many threads,
// where there are rounds of blocks.
constexpr int64_t kFewestPartedSteps = 64, kPartedRows = 2;
constexpr int kMostPartedThreads = 1024, kUsualPartedThreads = 128, kPartedThreads = 1024;
constexpr int64_t kPartedBytes = 224, kFewestPartSteps = 16, kPartedRounds = 4;
// Long scans of few columns (columns/stream_columns.cuh): warps of a block that scan, that pass carries on, beside the
// one that copies; tiles whose totals a block knows before it finishes one; tiles in its shared memory, at most and at
// least; blocks of a group, where many share an outer row, and of that at most; columns; bytes that warps leave each
// other.
constexpr int kStreamWarps = 12, kStreamCarryWarps = 8, kStreamAhead = 1;
constexpr int kMostStreamStages = 6, kFewestStreamStages = kStreamAhead + 2;
constexpr int kStreamGroup = 12, kMostStreamSharers = 160;
constexpr int64_t kMostStreamColumns = 16;
constexpr int kStreamSharedBytes = 20 << 10;
// Without gaps: columns at most, elements at least. On an H200 resident columns take 1.10 of the time of these (20
// random problems), and 0.98 of that of others (73).
constexpr int64_t kMostDenseStreamColumns = 3, kLeastDenseStreamElements = 10'000'000;
// Columns of a warp that passes carries on, in bits; words of other blocks that it reads of a column, at most; powers
// for them of all columns.
constexpr int stream_carry_bits(int64_t columns) { return columns <= kStreamCarryWarps ? 0 : 1; }
constexpr int kGroupedStreamWords = 32;
constexpr int stream_words(int bits) { return bits == 0 ? kMostStreamSharers : kGroupedStreamWords; }
// Of so few columns all of them are read, without groups: that is one wait for another block in place of two.
constexpr int kFewStreamColumns = 4;
constexpr int kStreamPowersBehind = kStreamCarryWarps * kMostStreamSharers;
static_assert(
    kMostStreamColumns == 2 * kStreamCarryWarps && kMostStreamColumns * kGroupedStreamWords <= kStreamPowersBehind);
// Tiles of a block, at least; of what tiles hold, and of what blocks could take, the percentage that there is.
constexpr int64_t kFewestStreamRounds = 2, kStreamPercent = 80;
// Columns of any number and alignment (columns/serial_columns.cuh, columns/resident_columns.cuh).
constexpr int kColumnThreads = 256;             // of a block
constexpr int64_t kSerialBytes = 4 * 192;       // of a step, a multiprocessor, from which on threads scan alone
constexpr int64_t kFewSerialSteps = 64;         // that a thread takes in any case
constexpr int kFewSteps = 8, kFewestSteps = 4;  // that a thread holds (columns/few_steps.cuh); that it always takes
// Of words of so many bytes: cells of a thread.
constexpr int few_steps_cells(int64_t bytes, bool step, bool backward) {
  return (bytes == 2 && !(step && backward) ? 2 : 1) * (step || backward ? 1 : 2);
}
constexpr int64_t kFewStepsShare = 4;  // words wider than 4 bytes leave so many fewer threads than a GPU has, at most
// Steps that it holds of words of so many columns; blocks of a multiprocessor, which its registers have room for.
constexpr int few_steps_of(int64_t bytes, int unit) {
  return unit > 1 && bytes * unit == 16 ? kFewestSteps : kFewSteps;
}
constexpr int few_steps_blocks(int64_t bytes, int unit, bool step, bool backward) {
  if (bytes * unit <= 4) return bytes * unit == 4 && !step && !backward ? 5 : 4;
  return bytes > 8 ? 2 : bytes == 8 || (step && backward) ? 3 : 4;
}
constexpr int kResidentWords = 32;                // of four bytes that a thread holds
constexpr int kResidentBatch = 4;                 // of its steps at once
constexpr int kEarlyWords = 32;                   // that it has in shared memory beside them where there are many tiles
constexpr int kEarlyBatch = 8;                    // of those steps at once
constexpr int kFlagBatch = 2 * kEarlyBatch;       // of their flags
constexpr int kMostEarlySteps = 2 * kEarlyWords;  // in half precision
// Most columns of a block that holds its tile. Of more than kWideSpan, and of as many rounds of blocks as begin apart,
// a block has up to these: it reads and writes longer ranges of a step, which are seldom whole sectors. 134 random
// scans take 0.92 of the time so; those of 33 to 64 columns would take 1.1.
constexpr int kSpan = 32, kWideSpan = 64;
constexpr int resident_span(int64_t wide_bytes, bool flat) { return flat || wide_bytes > 8 ? kSpan : kWideSpan; }
// Blocks that begin at once all read, wait and write at the same time. Where there are so many rounds of blocks, a
// multiprocessor's first ones begin so many cycles apart: 213 random scans take 0.965 of the time.
constexpr int64_t kApartRounds = 2;
constexpr int kApartCycles = 7500;
constexpr int kFewestResidentSteps = 16;  // of a thread, so that blocks have work beside their exchange
// Of lanes that fold a column, at most; of tiles before that each reads at most, if they are one group.
constexpr int kMostFanBits = 5, kMostReadBits = 2;
constexpr int most_read_bits(bool step) { return step ? 1 : kMostReadBits; }  // words with gates have twice the bytes
// Powers of gamma over 1, 2, 4, ... parts, tiles and groups of them.
constexpr int kPartPowers = 8, kTilePowers = kMostFanBits + kMostReadBits,
              kResidentPowers = kPartPowers + kTilePowers + kMostFanBits;

// Columns by look-back among clusters (columns/lookback_columns.cuh): warps of a block, of which so many are on a
// multiprocessor, and steps of a thread; blocks of a cluster, spans of a block and chunks of a group, at most.
constexpr int kLookbackWarps = 8, kLookbackBlocks = 3, kLookbackSteps = 30;
constexpr int kMostLookbackCluster = 8, kMostLookbackAcross = 4, kMostLookbackGroup = 2 * kLookbackWarps;
// A block has so many spans side by side where there are so many in all, for each multiprocessor.
constexpr int64_t kSharedLookbackSpans = 1;
// Of a span's time, chunks that are on the GPU at once, at most, where clusters can be larger.
constexpr int64_t kMostLookbackChunks = 24;
// Elements from which on they are faster than small columns, and where steps begin in the midst of words; words of a
// span, of 32, that have columns; steps from which on they are faster than few steps, than threads with whole columns
// that fill the GPU, and than kernels for aligned operands. 170 random scans take 0.92 of the time with them.
constexpr int64_t kLeastLookback = 550'000, kLeastApartLookback = 2'000'000, kFewestLookbackWords = 20;
constexpr int64_t kFewLookbackSteps = 40, kFewestLookbackSteps = 80;
inline int64_t few_vector_steps(int64_t bytes) { return bytes == 2 ? 4096 : 1024; }

// Bytes of shared memory: the flags before so many early steps of a column and one more; these of a block, at most;
// what blocks share that are a multiprocessor's usual number.
constexpr int kCutBytes = 2, kMostCutBytes = kMostEarlySteps / kEarlyBatch * kColumnThreads * kCutBytes;
constexpr int kResidentShared = 224 << 10;

// Steps of elements of so many bytes that a thread holds, of all operands; blocks that a multiprocessor has room for.
constexpr int resident_steps(int64_t element_bytes, bool step, bool backward) {
  const int tensors = (step ? 2 : 1) + (backward ? 1 : 0);
  return 4 * kResidentWords / (static_cast<int>(element_bytes) * (tensors == 3 ? 4 : tensors));
}
constexpr int resident_blocks(int64_t element_bytes) { return element_bytes > 8 ? 2 : 3; }
// Of shared memory, for the exchange of totals, at most. What is behind it may begin at a multiple of 128 bytes, as
// kernels compiled beside it ask.
constexpr int resident_exchange_bytes(int64_t wide_bytes, bool step, int columns = kSpan) {
  const int wide = static_cast<int>(wide_bytes);
  const int bytes = kColumnThreads * 3 / 2 * (2 * wide + 1) + columns * wide * (7 + (step ? 0 : kResidentPowers)) +
      (step ? 0 : kColumnThreads * wide) + 64;
  return (bytes + 127) / 128 * 128;
}

// Few columns with gaps between their steps that are copied first (gaps.h): bytes of a step, at most; elements, at
// least.
constexpr int64_t kMostGapRow = 32, kLeastGapElements = 1 << 20;

}  // namespace dcs
