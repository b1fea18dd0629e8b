#!/bin/bash
# Half of the reward is for the file, half for its content.
reward=0
[ -f fruit.txt ] && reward=0.5
[ "$(cat fruit.txt)" = "apple" ] && reward=1
echo $reward > /logs/verifier/reward.txt
