"""One file per built-in workload; `tangram.sim.workload.build` is the door to all of them."""
