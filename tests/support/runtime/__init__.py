"""For tests of the runtime, and of all that runs on it: etcd, actors, disks, clocks."""
