#!/bin/sh
# What issue-sized claims about GPUs rest on, in a few minutes on one H100 or H200: times, launches, memory.
#
#   sh benchmarks/gpu.sh mace        # in the MACE environment
#   sh benchmarks/gpu.sh nequip      # in the NequIP environment
#
# Writes runs/gpu_HOST.json, runs/gpu_HOST_eager_kernel.json (E2IP_KERNEL=eager) and runs/gpu_HOST.txt, the launches
# that torch's profiler saw. A failure of one step does not keep the others from running.
host=${1:?mace or nequip}
cd "$(dirname "$0")/.." || exit 1
mkdir -p runs
failed=0
step() { echo "== $*"; "$@" || failed=1; }

# The trial of every kernel, and launches as the profiler counts them on the device.
step python -m pytest -q -p no:cacheprovider tests/core/readout/kernels tests/core/maths/kernels/test_triton.py -k gpu
step python benchmarks/launches.py --host "$host" --device cuda | tee "runs/gpu_$host.txt"

options="--host $host --device cuda --rounds 40 --seconds 15"
step python benchmarks/hosts.py $options --systems 21,192 --no-memory --out "runs/gpu_$host.json"
step python benchmarks/hosts.py $options --systems 1500,10002 --tasks inference --no-committee --no-memory \
  --out "runs/gpu_${host}_large.json"
# Beside the path without the fused kernels, on the same machine.
E2IP_KERNEL=eager step python benchmarks/hosts.py $options --systems 21,192 --tasks inference --no-committee \
  --no-memory --out "runs/gpu_${host}_eager_kernel.json"
if [ "$host" = nequip ]; then
  for kernel in auto triton; do
    E2IP_KERNEL=$kernel step python benchmarks/hosts.py $options --modes aoti --systems 21,192 --tasks inference \
      --no-committee --no-memory --out "runs/gpu_nequip_aoti_$kernel.json"
  done
fi
step python benchmarks/memory_gpu.py --host "$host"
exit $failed
