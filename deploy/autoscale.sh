#!/bin/sh
# Scales a NanoCP service by its queue: metrics in, `nanocp scale` out.
#
#   deploy/autoscale.sh [STATUS_HOST:PORT] [FEWEST] [MOST]
#
# One more instance if requests wait in three looks in a row, one fewer if none waits and fewer than
# half of the frames are taken in twenty. With KubeRay, run it beside the head with the workers'
# number fixed to MOST: the service keeps their places, and starts a process only in those it uses.
set -eu
target=${1:-127.0.0.1:9464} fewest=${2:-2} most=${3:-4}
busy=0 idle=0

value() {  # of a metric, summed over its labels
    curl -fsS "http://$target/metrics" | awk -v name="nanocp:$1" '
        index($0, name) == 1 && /^[^ ]+ / { sum += $NF; found = 1 }
        END { if (!found) exit 1; printf "%d\n", sum * 100 }'
}

while sleep 5; do
    waiting=$(value num_requests_waiting) || continue
    taken=$(value kv_cache_usage_perc) || continue
    serving=$(curl -fsS "http://$target/cluster/seats" |
        sed 's/.*"serving": \[\([^]]*\)\].*/\1/' | tr ',' '\n' | grep -c .) || continue
    if [ "$waiting" -gt 0 ]; then busy=$((busy + 1)) idle=0; else busy=0 idle=$((idle + 1)); fi
    if [ "$taken" -gt $((50 * serving)) ]; then idle=0; fi
    if [ "$busy" -ge 3 ] && [ "$serving" -lt "$most" ]; then
        nanocp scale $((serving + 1)) --target "$target" || true
        busy=0
    elif [ "$idle" -ge 20 ] && [ "$serving" -gt "$fewest" ]; then
        nanocp scale $((serving - 1)) --target "$target" || true
        idle=0
    fi
done
