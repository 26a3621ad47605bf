#!/bin/bash
# After a job: what it called goes up, and the node's daemon (docs/systemd) may tune again unless other jobs are here. A part
# of Epilog= in slurm.conf; runs as root. Never fails: an Epilog that fails would drain the node.
GEMMTUNED="${GEMMTUNED:-/opt/gemmtuned/bin/gemmtuned}"
GEMMTUNED_HOME="${GEMMTUNED_HOME:-/var/lib/gemmtuned}"
export GEMMTUNED_HOME

if [ -n "${GEMMTUNED_SYNC:-}" ]; then
    timeout 20 runuser -u gemmtuned -- "$GEMMTUNED" sync "$GEMMTUNED_SYNC" >/dev/null
fi
others="$(squeue --noheader --nodelist="${SLURMD_NODENAME:-$(hostname -s)}" --states=RUNNING --format=%A)" || others=unknown
if ! printf '%s\n' "$others" | grep -v "^${SLURM_JOB_ID:-none}\$" | grep -q .; then
    systemctl start gemmtuned
fi
exit 0
