// Which SpMM kernel serves a call.
//
// Copied or scaled sources are what training spends its time on. They go to spmm_rows where the graph has a work list;
// else their sums and means go to spmm_balanced, which needs nothing. Both gather 16 bytes at a time. Sources whose
// rows are no whole number of these (41 classes) are gathered value by value along a list, with one weight for all
// features, where a copy of the sources would be a large part of the whole; else they are padded first, in the
// workspace, where the graph reads enough of them. The rest (max and min without a list, edge features, other
// broadcasts) goes to spmm_general.
//
// How wide a slice of the features a worker takes, in 16-byte lanes: what the list says; else as wide as the features
// up to 16 (256 bytes), up to 32 where rows are short. The plan that comes with a list (gnnaccel/schedule/rules.py:
// plan_of, by rule; tune.py, measured) may also send its sums and means to spmm_balanced, or be a list for spmm_groups.
#include <algorithm>

#include "spmm.cuh"

namespace gnnaccel {
namespace cuda {
namespace {

constexpr int kMaxLanes = kMaxSpreadLanes;
constexpr int kWideLanes = 32;
constexpr int64_t kHalfLine = 64;    // bytes
constexpr int64_t kShortDegree = 8;  // rows that leave a worker waiting, unless it streams on

bool scales_sources(Message message) { return message == Message::copy_lhs || message == Message::mul; }
bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

enum class Kernel { rows, groups, balanced, narrow, general };

struct Choice {
  SpmmCall call;  // as the kernel is to have it
  Kernel kernel;
  Slice slice;
  int64_t padded_bytes;  // of the head of the workspace; 0: the call is as it was
};

// Slices of `vectors` of 16 bytes.
Slice cut(int64_t vectors, int max_lanes, bool spread) {
  int lanes = 4;
  while (lanes < max_lanes && lanes < vectors) lanes *= 2;
  return {lanes, ceil_div(vectors, lanes), spread};
}

// What the kernels but spmm_general want: a copied or scaled source, every address aligned to 16 bytes. No lanes: the
// call is not for them.
Slice slice_of(const SpmmCall& call, int max_lanes) {
  const int n = 16 / size_of(call.dtype);
  const bool whole = call.lhs.data && call.lhs.div == 1 && call.lhs.len % n == 0 && aligned(call.lhs.data);
  if (!scales_sources(call.message) || !whole) return {0, 0, false};
  if (!call.has_padded_sources() && (call.num_feats % n || !aligned(call.out))) return {0, 0, false};
  // One weight for all features of a lane; one for all features of the source where anything is fused.
  if (call.message == Message::mul && call.rhs.len != 1 && (call.rhs.div % n || !call.fused.empty())) {
    return {0, 0, false};
  }
  return cut(ceil_div(call.num_feats, n), max_lanes, false);
}

// Rows of any width and address whose features share a weight, along a list.
Slice spread_of(const SpmmCall& call) {
  const bool whole = call.lhs.data && call.lhs.div == 1 && call.lhs.len == call.num_feats;
  const bool groups = call.work.kernel == SpmmKernel::groups;
  const bool serves = call.work.items && scales_sources(call.message) && whole &&
                      (call.message == Message::copy_lhs || call.rhs.len == 1) &&
                      (!call.extreme() || (!groups && call.graph.nnz <= INT32_MAX));
  if (!serves) return {0, 0, true};
  // As many lanes for 16-bit features as for f32: neighbouring ones want 32 bytes together at least. Not more than
  // those with which a block has room for all workers of a list of groups.
  const int64_t n = 16 / size_of(call.dtype);
  const int most = groups ? std::min(kMaxLanes, call.work.lanes) : kMaxLanes;
  Slice slice = cut(ceil_div(call.num_feats, std::min<int64_t>(n, 4)), most, true);
  slice.slices = ceil_div(call.num_feats, slice.lanes * n);
  return slice;
}

Choice choose(const SpmmCall& call) {
  const int64_t degree = call.graph.nnz / call.graph.num_rows;
  const bool of_edges = call.message == Message::copy_rhs;
  const SpmmCall few = of_edges ? spmm_of_edges(call) : call;
  if (spmm_narrow_serves(few, of_edges)) return {few, Kernel::narrow, {0, 0, false}, 0};
  // Of 16 bits that kernel has twice the sums to a lane. H200, amazon0505-like, 128 features of bfloat16: 0.42 ms, 0.24
  // along the list; 64 of float32 0.23 and 0.22 (weighted 0.24, the least of all plans then). Rows so short that a
  // worker is to stream, in slices of 32 lanes, were not timed.
  const bool of_halves = size_of(call.dtype) == 2 && call.work.lanes <= kMaxLanes;
  const SpmmKernel wanted = of_halves && call.work.kernel == SpmmKernel::balanced ? SpmmKernel::rows : call.work.kernel;
  Kernel kernel = !call.work.items || wanted == SpmmKernel::balanced ? Kernel::balanced
                  : wanted == SpmmKernel::groups                     ? Kernel::groups
                                                                     : Kernel::rows;
  if (call.extreme()) {  // spmm_rows keeps positions of nonzeros in 32 bits
    kernel =
        call.work.items && wanted != SpmmKernel::groups && call.graph.nnz <= INT32_MAX ? Kernel::rows : Kernel::general;
  }
  const int most = kernel == Kernel::rows ? kMaxLanes : kWideLanes;
  const int usual = kernel == Kernel::balanced && degree < kShortDegree ? kWideLanes : kMaxLanes;
  const bool meant =
      call.work.lanes && (kernel == Kernel::rows) == (wanted == SpmmKernel::rows);  // for the kernel that serves
  int lanes = std::min(meant ? call.work.lanes : usual, most);
  Choice choice{call, kernel, {0, 0, false}, 0};
  const Choice any{call, Kernel::general, {0, 0, false}, 0};
  if (kernel == Kernel::general || call.graph.nnz == 0) return any;
  if (kernel != Kernel::balanced) choice.call = with_padded_sources(call, choice.padded_bytes);
  // A plan with narrow slices counts on lines that no other slice asks for. H100, 100 features: amazon0505-like 0.99
  // ms, 0.85 so; proteins-like 5.1 and 4.2.
  const int64_t stride = choice.call.lhs.len * size_of(call.dtype);
  const bool slices = kernel == Kernel::rows || kernel == Kernel::balanced;
  if (slices && meant && lanes < kMaxLanes && stride > 16 * lanes && stride % kHalfLine != 0 && stride % 16 == 0) {
    choice.kernel = kernel = Kernel::rows;
    lanes = kMaxLanes;
  }
  choice.slice = slice_of(choice.call, lanes);
  if (choice.slice.lanes) return choice;
  const Choice spread{call, kernel == Kernel::groups ? kernel : Kernel::rows, spread_of(call), 0};
  const bool often = call.graph.nnz >= kReadOften * (call.graph.num_rows + call.graph.num_cols);
  if (spread.slice.lanes && !often) return spread;
  // The copies of results are of dtype, and of rows of another length than `own` has.
  if (scales_sources(call.message) && aligned(call.out) && !call.fused.own && !call.fused.wide) {
    choice.call = padded(call, kernel != Kernel::balanced, choice.padded_bytes);
    choice.slice = slice_of(choice.call, lanes);
  }
  return choice.slice.lanes ? choice : spread.slice.lanes ? spread : any;
}

SpmmCall call_of(const Csr& graph, const WorkList& work, const Operand& lhs, const Operand& rhs, void* out,
                 int64_t num_feats, Message message, Reduce reduce, DType dtype, const Fused& fused) {
  const Operand none{nullptr, 1, 1};
  SpmmCall call{};
  call.graph = graph;
  call.work = work;
  call.lhs = message == Message::copy_rhs ? none : lhs;
  call.rhs = message == Message::copy_lhs ? none : rhs;
  call.out = out;
  call.num_feats = num_feats;
  call.message = message;
  call.reduce = reduce;
  call.dtype = dtype;
  call.fused = fused;
  if (!fused.empty() && message == Message::copy_lhs) call.graph.edge_ids = nullptr;  // there is no weight to name
  return call;
}

int64_t bytes_of(const Choice& choice) {
  switch (choice.kernel) {
    case Kernel::rows:
      return choice.padded_bytes + spmm_rows_workspace_bytes(choice.call);
    case Kernel::groups:
      return choice.padded_bytes + spmm_groups_workspace_bytes(choice.call);
    case Kernel::balanced:
      return choice.padded_bytes + spmm_balanced_workspace_bytes(choice.call, choice.slice);
    case Kernel::narrow:
      return spmm_narrow_workspace_bytes(choice.call);
    default:
      return spmm_general_workspace_bytes(choice.call);
  }
}

cudaError_t launch(const Choice& choice, cudaStream_t stream) {
  switch (choice.kernel) {
    case Kernel::rows:
      return spmm_rows(choice.call, choice.slice, stream);
    case Kernel::groups:
      return spmm_groups(choice.call, choice.slice, stream);
    case Kernel::balanced:
      return spmm_balanced(choice.call, choice.slice, stream);
    case Kernel::narrow:
      return spmm_narrow(choice.call, stream);
    default:
      return spmm_general(choice.call, stream);
  }
}

}  // namespace

cudaError_t spmm(Workspace& workspace, const Csr& graph, const WorkList& work, const Operand& lhs, const Operand& rhs,
                 void* out, void* arg_lhs, void* arg_rhs, int64_t num_feats, Message message, Reduce reduce,
                 DType dtype, double empty_value, const Fused& fused, cudaStream_t stream) {
  if (graph.num_rows == 0 || num_feats == 0) return cudaSuccess;
  SpmmCall call = call_of(graph, work, lhs, rhs, out, num_feats, message, reduce, dtype, fused);
  call.arg_lhs = arg_lhs;
  call.arg_rhs = arg_rhs;
  call.empty_value = empty_value;
  if (!aligned(arg_lhs) || !aligned(arg_rhs)) return cudaErrorInvalidValue;
  if (!fused.empty() && reduce != Reduce::sum) return cudaErrorInvalidValue;
  if (!fused.empty() && !scales_sources(message)) return cudaErrorInvalidValue;
  if (fused.own && (!fused.own_factor || !aligned(fused.own))) return cudaErrorInvalidValue;
  if (fused.wide && size_of(dtype) != 2) return cudaErrorInvalidValue;
  call.workspace = reinterpret_cast<void*>(uintptr_t{256});  // some address with the alignment of what comes
  call.workspace = workspace.take(bytes_of(choose(call)));
  const Choice choice = choose(call);
  if (choice.padded_bytes == 0) return launch(choice, stream);
  cudaError_t status = spmm_pad(call, choice.call, stream);
  if (status == cudaSuccess) status = launch(choice, stream);
  return status == cudaSuccess ? spmm_unpad(call, choice.call, stream) : status;
}

}  // namespace cuda
}  // namespace gnnaccel
