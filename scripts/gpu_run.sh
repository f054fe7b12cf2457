#!/bin/sh
# Builds gnnaccel for this machine's GPU with what is installed (no network, no virtual environment), then runs
# the named stages on it, from the repository's root:
#   scripts/gpu_run.sh test sanitize bench kernels      logs and tables go to $OUT (default: build/gpu)
# Needs nvcc, cmake, ninja, pybind11, torch with CUDA and pytest; PYTHON names the interpreter (default: python3).
set -eu
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED

capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
cmake -S . -B build/gpu-cmake -G Ninja -DGNNACCEL_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$capability-real" \
  -DPython_EXECUTABLE="$(command -v "$PYTHON")" > "$OUT/build.log" 2>&1 &&
  cmake --build build/gpu-cmake >> "$OUT/build.log" 2>&1 || { tail -n 40 "$OUT/build.log"; exit 1; }
cp build/gpu-cmake/_C*.so gnnaccel/
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
"$PYTHON" -c 'import sys, torch; print("torch", torch.__version__, "Python", sys.version.split()[0])'

# All that needs nothing but torch, PyG, DGL (skipped without) and pytest; those that take longest first.
tests=$(for name in pyg_compiled dgl_cuda pyg_matrix pyg_autocast captured_models captured_modules captured_modules_autograd captured_modules_refused captured captured_layers captured_refused captured_guards captured_optimizers captured_modules_dgl ops cuda_ops \
    cuda_lists pyg_autograd deterministic cuda_messages cuda_tiles cuda_maxk maxk cbsr maxk_models cuda_runtime cuda_tune plans translate worklist \
    reorder cuda_pyg cuda_build attention dot_attention gatv2 graph_conv ops_registration layers structure ready_softmax pyg_inputs pyg_norms \
    pyg_structure pyg_user_layers pyg_trust pyg_first_calls pyg_few_messages pyg_sampled_batches pyg_to_hetero \
    pyg_compile graph cache data memory nn ready hubs races cuda_relations cuda_hetero sampled_sums ahead begun relational_attention \
    linear_sums ready_weighted sampling sampling_subgraphs cuda_sampling cuda_sampling_kinds pyg_samplers cuda_pyg_sampling dgl_samplers dgl_block_index dgl_bridge \
    captured_distributed compiled_autograd cuda_packed cuda_products cuda_pyg_subgraphs dgl_subgraphs own_sum cuda_finished_sums cuda_few_features cuda_numbering profile segment_softmax feature_cache mapped_sums pyg_dist_sampling pyg_replayed pyg_sliced normed_layers super_gat joined_maps pyg_once_per_edges wide_products; do
  echo "tests/test_$name.py"; done)
status=0
for stage in "$@"; do
  case $stage in
    test)
      # A process for each file, JOBS at a time: what one does to torch meets no other. 5: none of its tests runs here.
      mkdir -p "$OUT/tests"
      for file in ${TESTS:-$tests}; do echo "$file"; done | OMP_NUM_THREADS=2 PYTHON="$PYTHON" OUT="$OUT" xargs -P "${JOBS:-8}" -I{} \
        sh -c '"$PYTHON" -m pytest -q -rf --tb=short -p no:cacheprovider {} > "$OUT/tests/$(basename {}).log" 2>&1 || [ $? = 5 ]' || status=1
      tail -q -n 1 "$OUT"/tests/*.log
      grep -h "^FAILED\|^ERROR" "$OUT"/tests/*.log || true ;;
    sanitize)
      # initcheck has to see torch's kernels too (they write our inputs); only reads by ours count.
      for tool in memcheck racecheck initcheck; do
        only="--kernel-name kns=gnnaccel"
        [ $tool = initcheck ] && only=""
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool $only "$PYTHON" tests/sanitize_cuda.py \
          > "$OUT/$tool.log" 2>&1 || status=1
        ours=$(grep -c "at .*gnnaccel::cuda\|at gnnaccel_message" "$OUT/$tool.log" || true)
        [ "$ours" = 0 ] && grep -q "all kernels ran" "$OUT/$tool.log" || status=1
        echo "$tool: $ours errors in gnnaccel's kernels; $(tail -n 1 "$OUT/$tool.log")"
      done
      # Captured steps need torch's allocator.
      compute-sanitizer --tool memcheck --kernel-name kns=gnnaccel "$PYTHON" -m pytest -q -p no:cacheprovider \
        tests/test_captured_layers.py tests/test_captured_modules.py -k "layers_of_pyg or a_module_is_captured" > "$OUT/captured.log" 2>&1 || status=1
      grep -q "ERROR SUMMARY: 0 errors" "$OUT/captured.log" || status=1
      echo "memcheck of captured steps and modules: $(tail -n 1 "$OUT/captured.log")" ;;
    bench)
      "$PYTHON" benchmarks/cuda_ops.py ${BENCH:-} --csv "$OUT/cuda_ops.csv" 2>&1 | tee "$OUT/bench.log" || status=1 ;;
    kernels)
      "$PYTHON" benchmarks/cuda_kernels.py ${KERNELS:---prepared} --csv "$OUT/cuda_kernels.csv" 2>&1 |
        tee "$OUT/kernels.log" || status=1 ;;
    *)
      echo "unknown stage '$stage': expected test, sanitize, bench or kernels"; exit 2 ;;
  esac
done
exit $status
