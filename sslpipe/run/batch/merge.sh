# behind the array, a job without a task merges what its tasks have built: build OUT ... -> merge OUT
[ -n "${SLURM_ARRAY_TASK_ID:-}" ] || set -- merge "$2"
