"""Compare step speed with nanoGPT on a CPU, at equal shapes.

    git clone https://github.com/karpathy/nanoGPT
