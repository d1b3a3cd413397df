"""No processes: the real runner on a virtual network, the failure detector in a simulated world."""
