! A program that names p?getrf, but no p?gemm.
program factors
    use mpi
    implicit none
    integer, parameter :: n = 64, block = 8
    integer :: context, row, column, rows, columns, height, width, info, i, j, ierr
    integer, external :: numroc, indxl2g
    integer :: desc(9)
    integer, allocatable :: pivots(:)
    double precision, allocatable :: a(:, :)
    call MPI_Init(ierr)
    call blacs_get(-1, 0, context)
    call blacs_gridinit(context, 'R', 2, 1)
    call blacs_gridinfo(context, rows, columns, row, column)
    height = numroc(n, block, row, 0, rows)
    width = numroc(n, block, column, 0, columns)
    allocate (a(height, width), pivots(height + block))
    do j = 1, width
        do i = 1, height
            a(i, j) = 1d0/(1 + abs(indxl2g(i, block, row, 0, rows) - indxl2g(j, block, column, 0, columns)))
        end do
    end do
    call descinit(desc, n, n, block, block, 0, 0, context, height, info)
    call pdgetrf(n, n, a, 1, 1, desc, pivots, info)
    if (info /= 0) error stop
    call MPI_Finalize(ierr)
end program
