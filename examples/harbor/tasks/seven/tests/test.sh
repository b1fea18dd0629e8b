#!/bin/bash
# Half of the reward is for the file, half for its content.
reward=0
[ -f number.txt ] && reward=0.5
[ "$(cat number.txt)" = "seven" ] && reward=1
echo $reward > /logs/verifier/reward.txt
