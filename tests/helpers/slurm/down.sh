#!/usr/bin/env bash
# End the cluster that up.sh started in DIR: its daemons by their pid files, nothing else.
set -uo pipefail
dir=$(cd "${1:?the folder given to up.sh}" && pwd)
export SLURM_CONF=$dir/slurm.conf
scancel --user="$(id -un)" 2>/dev/null
for _ in $(seq 30); do
  [ -z "$(squeue --noheader --states=running,completing 2>/dev/null)" ] && break
  sleep 0.5
done
for pid_file in "$dir"/slurmd-*.pid "$dir/slurmctld.pid" "$dir/munge/pid"; do
  [ -s "$pid_file" ] || continue
  pid=$(cat "$pid_file")
  kill "$pid" 2>/dev/null
  for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
  kill -9 "$pid" 2>/dev/null
done
exit 0
