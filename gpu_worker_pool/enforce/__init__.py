"""`gpu-pool enforce`: only the holders of a GPU may open its device."""
