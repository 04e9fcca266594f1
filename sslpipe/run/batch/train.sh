# The job: `sslpipe train "$@"` on every node, saved and requeued until it is done.
run=
words=("$@") settings=()
for ((i = 0; i < $#; i++)); do
  case ${words[i]} in
    --run-dir) run=${words[++i]:-} ;;
    --run-dir=*) run=${words[i]#--run-dir=} ;;
    *) settings+=("${words[i]}") ;;
  esac
done
run=${run/#\~\//$HOME/} # of --run-dir=~/runs, as the program does
[ -n "$run" ] || { echo "slurm: give --run-dir RUN" >&2; exit 2; }
mkdir -p "$run"

# An array's task is requeued by this name; elsewhere it is the job's number.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
# The stop file bears this start's number: one that is left over cannot stop the next.
export SSLPIPE_STOP_FILE=$run/STOP.$job.${SLURM_RESTART_COUNT:-0}
export SSLPIPE_REFUSED_FILE=$run/REFUSED.$job
rm -f "$run/STOP.$job".* "$SSLPIPE_REFUSED_FILE"
trap 'touch "$SSLPIPE_STOP_FILE"' USR1 TERM
newest() { cat "$run/checkpoints/latest" 2>/dev/null || echo none; }

# A limit on restarts that come to nothing, counted here because a killed start cannot count.
before=$(newest)
read -r counted_job counted_at idle 2>/dev/null <"$run/starts" || { counted_job= counted_at= idle=0; }
[ "$counted_job $counted_at" = "$job $before" ] && idle=$((idle + 1)) || idle=1
echo "$job $before $idle" >"$run/starts"
give_up() {
  echo "slurm: $1 starts of job $job in a row made no new checkpoint (the newest: $before)" |
    tee "$run/FAILED" >&2
  exit 1
}
((idle <= SSLPIPE_MAX_IDLE_STARTS)) || give_up $((idle - 1))

# By this variable alone a step gets the cores of its job (SLURM 22.05 and newer).
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-}
[ -n "$SRUN_CPUS_PER_TASK" ] || unset SRUN_CPUS_PER_TASK

# A wrong recipe or missing data end here, in one line, before all nodes start. By srun, too: a site's
# container may be the only place that has sslpipe.
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] ||
  srun --nodes=1 --ntasks=1 "${srun_options[@]}" ${inside[@]+"${inside[@]}"} \
    python -m sslpipe check "${settings[@]}" >/dev/null

gpus=${SLURM_GPUS_ON_NODE:-0}
processes=$((gpus > 0 ? gpus : SSLPIPE_CPU_PROCESSES))
world=$((SLURM_NNODES * processes))
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A node's name need not resolve; its address does.
address=$(scontrol --oneliner show node "$head" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
export SSLPIPE_PROCESSES=$world
export MASTER_ADDR=${MASTER_ADDR:-${address:-$head}}
export MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}

# One launcher a node; a single process needs none. torch's own, which accelerate's starts, too:
# it reads no configuration of the user's.
# shellcheck disable=SC2016 # the variables in quotes are the step's
srun "${srun_options[@]}" ${inside[@]+"${inside[@]}"} bash -c '
  [ "$SSLPIPE_PROCESSES" -gt 1 ] || exec python -m sslpipe train "$@"
  exec python -m torch.distributed.run --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node $((SSLPIPE_PROCESSES / SLURM_NNODES)) \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    -m sslpipe train "$@"' sslpipe "$@" &
step=$!
code=0
while kill -0 "$step" 2>/dev/null; do # a trapped signal ends `wait` early
  wait "$step" && code=0 || code=$?
done

# Files, not exit codes, say how it ended: the launcher replaces every code by 1.
if [ -e "$SSLPIPE_REFUSED_FILE" ]; then
  cat "$SSLPIPE_REFUSED_FILE" >&2 # not the run that the directory holds: it stays as it was
  rm "$SSLPIPE_REFUSED_FILE"
  exit 1
fi
if [ -e "$run/DONE" ]; then
  exit 0
fi
if [ -e "$run/FAILED" ] &&
  grep -qE '^rank [0-9]+: (User|Recipe|Data|Checkpoint|Export|Weights)Error' "$run/FAILED"; then
  cat "$run/FAILED" >&2 # a mistake in the input: the same again would not help
  exit 1
fi
# Preempted, out of time, or a node or the network was lost.
if [ "$(newest)" = "$before" ] && ((idle >= SSLPIPE_MAX_IDLE_STARTS)); then
  give_up "$idle"
fi
# A cancelled job is RUNNING no more; requeueing would bring it back. One that SLURM itself
# requeues, preempted or its node lost, is COMPLETING, too, but its restarts are counted already.
record=$(scontrol --oneliner show job "$job")
state=$(sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p' <<<"$record")
restarts=$(sed -n 's/.* Restarts=\([0-9]*\).*/\1/p' <<<"$record")
if ((${restarts:-0} > ${SLURM_RESTART_COUNT:-0})); then
  echo "slurm: job $job is requeued by SLURM; it resumes from $(newest)"
  exit 1
fi
if [ "$state" != RUNNING ]; then
  echo "slurm: job $job is $state, not requeued; the same command resumes from $(newest)"
  exit 1
fi
echo "slurm: job $job ended with status $code at $(newest); requeued"
trap '' TERM # requeueing ends this script
scontrol requeue "$job" || exit 1
sleep 120
