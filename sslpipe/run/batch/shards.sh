# The job: `sslpipe shards "$@"`; a task of an array builds its part, and resumes after a preemption.
part=()
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  part=(--part "$SLURM_ARRAY_TASK_ID/${SSLPIPE_PARTS:-$SLURM_ARRAY_TASK_MAX}")
fi
srun "${srun_options[@]}" ${inside[@]+"${inside[@]}"} \
  python -m sslpipe shards "$@" ${part[@]+"${part[@]}"}
