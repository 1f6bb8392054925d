#!/usr/bin/env bash
# Everything about the kernels that needs a GPU, in one go (under three minutes): build, tests, memory and race
# checks, times. Usage: examples/gpu_kernels.sh [FOLDER]; results go to FOLDER, by default to $OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:?name a folder for the results}}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=$PWD MICROSPEC_CACHE=$out/cache HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

# A carried wheel of `kernels` shows its loader at work; without it the kernels are imported directly.
if compgen -G '.whl/kernels*.whl' > /dev/null; then
    "$python" -m pip install -q --no-deps --no-index --target "$out/site" .whl/kernels*.whl
    export PYTHONPATH=$PWD:$out/site
fi

echo "== build"
archs=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
time "$python" cuda_kernels/build.py --backend cuda --archs "$archs" --output "$out/kernels"
export MICROSPEC_KERNELS=$out/kernels

echo "== who serves"
"$python" -c '
import json
from microspec_hf import ops
services = ops.load("cuda").values()
print(json.dumps({s.op: [s.tier, [(r.tier, r.reason) for r in s.refusals]] for s in services}, indent=1))
' | tee "$out/served_by.txt"

echo "== tests"
status=0
timeout 100 "$python" -m pytest -q -m gpu tests/cuda_kernels tests/ops 2>&1 | tee "$out/tests.txt" || status=$?

echo "== compute-sanitizer"
for tool in memcheck racecheck; do
    # Only our kernels are instrumented; without the caching allocator each tensor has its own bounds.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 100 compute-sanitizer --tool "$tool" --error-exitcode 7 \
        --kernel-regex kns=microspec "$python" tests/cuda_kernels/short_run.py \
        > "$out/sanitizer_$tool.txt" 2>&1 || status=$?
    echo "$tool: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/sanitizer_$tool.txt" || tail -3 "$out/sanitizer_$tool.txt")"
done

cat "$out/tests.txt" "$out"/sanitizer_*.txt > "$out/gpu_kernel_tests.txt"

if [ "$status" -ne 0 ]; then
    echo "A check failed (exit code $status): no times are measured."
    exit "$status"
fi

echo "== times"
cp cuda_kernels/README.md "$out/README.md"
timeout 120 "$python" examples/bench_kernels.py --tested --kernels "$out/kernels" --json "$out/kernels.json" \
    --readme "$out/README.md" 2>&1 | tee "$out/bench.txt"
if [ -n "$(command -v nvcc)" ] && [ -f cuda_kernels/benchmarks/gather_sweep.cu ]; then
    echo "== gather variants"
    nvcc -O3 -std=c++17 -arch="sm_${archs/./}" cuda_kernels/benchmarks/gather_sweep.cu -o "$out/gather_sweep"
    "$out/gather_sweep" | tee "$out/gather_sweep.txt"
fi
