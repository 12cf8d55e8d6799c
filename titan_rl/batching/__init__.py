"""From samples to fixed-shape micro-batches: packing, splitting into optimiser steps."""
