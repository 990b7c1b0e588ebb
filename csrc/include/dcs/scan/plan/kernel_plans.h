// What the plans say to the kernels, without how they are made: the tiles that a scan is cut into. Host code without
// CUDA or torch types, and without headers that every translation unit of kernels would have to read.
#pragma once

#include <cstdint>

#include "dcs/scan/plan/tuning.h"

namespace dcs {

// A thread sums the window of a step.
struct DirectWindowPlan {};
// Windows are composed of segments of 1, 2, 4, ... steps, for some rows at a time.
struct ComposedWindowPlan {
  int64_t rows, workspace_bytes;
};

enum class AlignedKernel {
  kThreadRows,    // rows/thread_rows.cuh
  kPackedRows,    // rows/packed_rows.cuh
  kWarpRows,      // rows/warp_rows.cuh
  kTileRows,      // rows/tile_rows.cuh
  kFewRows,       // long_rows/few_rows.cuh, long_rows/few_rows_gated.cuh
  kResidentRows,  // long_rows/resident.cuh
  kBulkStream,    // long_rows/bulk_stream.cuh
  kWarpColumns,   // columns/warp_columns.cuh
  kSplitColumns,  // columns/split_columns.cuh
  kBlockColumns,  // columns/block_columns.cuh
};

struct AlignedPlan {
  AlignedKernel kernel = AlignedKernel::kTileRows;
  int warps = 1;               // of a block
  int columns = 1;             // a lane's neighboring columns
  bool long_segments = false;  // of block columns: twice the steps a thread
  int64_t tile_elements = 0;
  int64_t tiles = 1;
  bool cluster = false;        // the tiles of a row are the blocks of a cluster
  bool row_per_block = false;  // of a stream: a block takes whole rows
  int64_t workspace_bytes = 0;
  int warp_chunks = 0;      // that a warp holds of a row, 32 vectors each; kBlockChunks: a block does
  bool in_turn = false;     // of split columns: enough blocks that their requests delay each other
  bool half_warps = false;  // of block columns: pairs of columns, half a warp a segment of time
  int row_clusters = 0;     // clusters of a row whose blocks read again what lies before them (long_rows/few_rows.cuh,
                            // long_rows/few_rows_gated.cuh)
  int most_shared = 0;      // bytes that one block can have
  int64_t dependent_blocks =
      0;  // so many may begin as the launch before them ends, where they need not be resident together
  int resident_rounds = 0;  // rounds in which all blocks together hold all rows on the chip (long_rows/resident.cuh)

  bool needs_coresident_blocks() const {  // for blocks that run together
    return cluster || row_clusters > 0 || (kernel == AlignedKernel::kBulkStream && !row_per_block);
  }
  int64_t partials() const {
    return row_per_block ? 1 : resident_rounds ? kResidentWarps * tiles : tiles;
  }  // of a row's part of gamma's gradient
};

// A block takes whole rows, a vector a thread, or a cluster of blocks takes one (rows/small_rows.cuh).
struct SmallRowsPlan {
  int warps;           // of a block
  int cluster;         // blocks of a row: 1 where a block takes whole rows
  int64_t group_rows;  // of a block or cluster
  int64_t blocks;
  bool dependent;  // may begin as the launch before it ends
  bool in_float;   // rows/float_rows.cuh
};
// A block takes whole rows, or a cluster of blocks takes one (rows/flat_rows.cuh).
struct FlatRowsPlan {
  int vectors, warps;   // of a lane, of a block
  int cluster;          // blocks of a row: 1 where a block takes whole rows
  int64_t tile, tiles;  // elements from block to block, in a cluster those of all its vectors; blocks
  int64_t shared_bytes;
  bool dependent;  // may begin as the launch before it ends
};
// Blocks that run together, or have a tile each, share rows (rows/long_rows.cuh).
struct LongRowsPlan {
  int vectors, stages;  // of a lane; tiles in shared memory
  bool apart;           // rows of the one tensor that is read, which is not flat, land before their place
  int64_t tile, tiles, blocks;
  int64_t shared_bytes, workspace_bytes;
  int64_t partials;  // of a row's part of gamma's gradient
  bool dependent;    // blocks have a tile each and may begin, in their order, as the launch before ends
};

// A thread takes all steps of some columns, a few each (columns/few_steps.cuh).
struct FewStepsPlan {
  int unit;   // neighboring columns that are read as one word
  int cells;  // of a thread, of so many columns
  int64_t blocks;
  bool dependent;  // may begin as the launch before it ends
};
// A thread takes all steps of its columns (columns/serial_columns.cuh).
struct SerialColumnsPlan {
  bool pairs;  // half-precision elements are read in pairs
  int64_t blocks;
  bool dependent;  // may begin as the launch before it ends
};
// A block takes the columns of some outer rows, of which it stages some steps at a time in shared memory; a thread
// takes all steps of its column (columns/staged_columns.cuh), or a part of those that are staged
// (columns/staged_parts.cuh).
struct StagedColumnsPlan {
  int slabs;                      // outer rows of a block
  int steps;                      // that are staged at a time
  int operand_bytes, slab_bytes;  // of shared memory for a slab's elements; with its flags
  int threads;                    // of a block
  int part_steps;                 // of a thread; 0: it takes all
  int fan_bits, team_bits;        // 2^these lanes of 2^these warps have a column's parts
  int slab_warp_bits;             // 2^these warps copy a slab
  bool flat;                      // a block's slabs are one contiguous range, in shared memory too
  int teams_at;                   // in shared memory, of what the warps of a team leave each other
  int64_t blocks, shared_bytes;
  int most_shared;  // bytes that one block can have
  bool dependent;   // may begin as the launch before it ends
};
// A block, or several, takes a span of columns through all of time (columns/small_columns.cuh).
struct SmallColumnsPlan {
  bool flat;       // what a warp has is one contiguous range of memory
  int span;        // columns of a block
  int64_t spans;   // side by side
  int span_bits;   // 2^these lanes of a warp for a span
  int steps;       // of a thread
  int warps;       // of a block
  int cluster;     // blocks of a span that are a cluster; or
  int sharers;     // so many that leave each other words in global memory; each 1 where there are none
  int64_t blocks;  // outer * spans * cluster * sharers
  int64_t workspace_bytes, shared_bytes;
  int most_shared;  // bytes that one block can have
  bool dependent;   // may begin as the launch before it ends
  bool in_float;    // columns/float_columns.cuh
};
// Blocks that run together take tiles, some steps of all columns, in turn (columns/stream_columns.cuh).
struct StreamColumnsPlan {
  int parts;                            // threads of a column
  int part_steps;                       // of a thread
  int stages, stage_bytes;              // tiles in shared memory
  int output_bytes;                     // of each of two tiles of results, where they have no room in the input's
  int sharers, group, groups;           // blocks of an outer row, in groups of so many
  int64_t strip_words;                  // that blocks publish of an outer row, for each column
  int64_t strips_apart, tiles, blocks;  // a block's outer rows; tiles of one
  int64_t shared_bytes, workspace_bytes;
  int most_shared;  // bytes that one block can have
};
// A warp has some steps of a span of columns, a block some spans, a cluster of blocks a chunk of their time
// (columns/lookback_columns.cuh).
struct LookbackColumnsPlan {
  bool apart;       // steps of half precision begin in the midst of words of four bytes
  int span;         // columns of a warp
  int64_t spans;    // side by side
  int across_bits;  // 2^these of a block
  int parts;        // warps of a span in a block
  int steps;        // of a thread
  int cluster;      // blocks of a chunk
  int64_t chunks;
  int group;            // of chunks, whose last one publishes all that lies before
  int64_t chunk_words;  // that a chunk publishes
  int64_t blocks, workspace_bytes;
  int warps;       // of a block
  bool dependent;  // may begin as the launch before it ends
};
// A block holds a tile, some steps of a span of columns (columns/resident_columns.cuh).
struct ResidentColumnsPlan {
  bool flat;           // a tile is one contiguous range of memory
  int span, spans;     // columns of a block, of which there are so many side by side
  int64_t strips;      // outer * spans: each a span of an outer row's columns through all of time
  int parts;           // threads of a column in a block
  int part_steps;      // of a thread
  int early_steps;     // the first of them, which are in shared memory: the others are in registers
  int fan_bits;        // 2^these lanes fold a column
  int read_bits;       // each reads 2^these tiles before, which make a group; as many of these are a group of groups
  int lane_bits;       // 2^these parts are a lane's
  int64_t tiles;       // of a strip
  int64_t apart;       // so many blocks of the first round begin together, the next ones later; 0: all together
  bool dependent;      // may begin as the launch before it ends
  int64_t groups;      // of tiles
  int part_vectors;    // of 16 bytes in shared memory, where a tile is one contiguous range
  int part_pitch;      // the same with what keeps parts in different banks
  uint32_t lead_mask;  // one less than steps that are whole vectors: less are before a row's first one (tile_copy.cuh)
  uint32_t span_inverse, vectors_inverse;  // 2^16 / span, 2^32 / part_vectors, rounded up
  int64_t flat_bytes;                      // of a tile in shared memory
  int64_t cuts_at;                         // in shared memory, of the early steps' flags
  int64_t shared_bytes, workspace_bytes;
  int exchange_bytes, most_shared;  // of shared memory: the kernel's own beside them, at most; that one block can have
  double powers[kResidentPowers];   // of a number gamma
};

}  // namespace dcs
