"""What every family needs: kernels and their launches, launch cache, chips and limits, numbers, views."""
