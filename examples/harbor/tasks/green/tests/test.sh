#!/bin/bash
# Half of the reward is for the file, half for its content.
reward=0
[ -f color.txt ] && reward=0.5
[ "$(cat color.txt)" = "green" ] && reward=1
echo $reward > /logs/verifier/reward.txt
