"""What `fednorm bench` measures: our engines beside the loop everybody writes, in one run on one machine."""
