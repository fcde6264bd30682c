"""Launches one config for Nsight Compute to count its bytes: one JSON object {shape, config} is the argument."""

from blocktune.tuner.profile.target import main

if __name__ == "__main__":
    main()
