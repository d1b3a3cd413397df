"""No processes: the real runner on a virtual network and on simulated GPUs."""
