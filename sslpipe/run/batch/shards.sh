# The job: `sslpipe shards "$@"`; a task of an array builds the folder of its line, and resumes after a preemption.
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  lines=${1:?a file with one line of options a folder}
  out=${2:?the folder of all folders}
  shift 2
  line_words "$lines"
  set -- build "$out/$SLURM_ARRAY_TASK_ID" "${words[@]}" "$@"
fi
srun "${srun_options[@]}" ${inside[@]+"${inside[@]}"} \
  python -m sslpipe shards "$@"
