#!/usr/bin/env bash
# A real SLURM on this machine, as root: one controller, two nodes, partitions `low` and `high`.
#   tests/helpers/slurm/up.sh DIR      starts it and prints the settings that its commands need
#   tests/helpers/slurm/down.sh DIR    ends everything that it started
# Everything lives in DIR; no service of the system is touched. Jobs in `low` are preempted and
# requeued for jobs in `high`, with 20 s of grace.
set -euo pipefail
dir=$(mkdir -p "${1:?a folder for the cluster}" && cd "$1" && pwd)
host=$(hostname -s)
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }
mkdir -p "$dir"/{state,spool,log,munge}
chmod 755 "$dir" "$dir/munge" # a client checks that nobody else can write there

[ -s "$dir/munge/key" ] || dd if=/dev/urandom of="$dir/munge/key" bs=1024 count=1 status=none
chmod 600 "$dir/munge/key"
munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
  --pid-file="$dir/munge/pid" --log-file="$dir/log/munged" --seed-file="$dir/munge/seed"

cat >"$dir/slurm.conf" <<CONF
ClusterName=sslpipe
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld
SlurmdLogFile=$dir/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
MinJobAge=3600
ReturnToService=2
SlurmdTimeout=300
MpiDefault=none
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free_port) CPUs=1
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free_port) CPUs=1
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
CONF

export SLURM_CONF=$dir/slurm.conf
slurmctld -i -f "$SLURM_CONF"
for node in n1 n2; do slurmd -N "$node" -f "$SLURM_CONF"; done
for _ in $(seq 60); do
  [ "$(sinfo --noheader --format %t --partition low 2>/dev/null)" = idle ] && {
    echo "export SLURM_CONF=$SLURM_CONF"
    exit 0
  }
  sleep 0.5
done
echo "the nodes did not come up; see $dir/log" >&2
tail -n 20 "$dir"/log/* >&2
exit 1
