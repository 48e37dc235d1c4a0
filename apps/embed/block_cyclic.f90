! C = A B on ScaLAPACK's block-cyclic matrices from Fortran, by PMM3D and by pdgemm.
!
!     mpifort embed/pmm3d.f90 apps/embed/block_cyclic.f90 -L build/embed -lpmm3d -lscalapack-openmpi \
!         -Wl,-rpath,$PWD/build/embed -o block_cyclic && mpirun -n 4 ./block_cyclic
program block_cyclic
    use mpi
    use pmm3d
    implicit none
    integer, parameter :: m = 300, n = 200, k = 100, block = 16
    integer :: ranks, rank, rows, columns, row, column, blacs, context, ierr
    integer, dimension(9) :: desca, descb, descc
    double precision, allocatable :: a(:, :), b(:, :), c(:, :), theirs(:, :)
    double precision :: difference, largest
    integer, external :: numroc

    call MPI_Init(ierr)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks, ierr)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
    rows = int(sqrt(dble(ranks)))
    do while (mod(ranks, rows) /= 0)
        rows = rows - 1
    end do
    columns = ranks/rows
    call blacs_get(-1, 0, blacs)
    call blacs_gridinit(blacs, 'R', rows, columns)
    call blacs_gridinfo(blacs, rows, columns, row, column)

    call make(m, k, a, desca)
    call make(k, n, b, descb)
    call make(m, n, c, descc)
    allocate (theirs, source=c)
    call pdgemm('N', 'N', m, n, k, 2d0, a, 1, 1, desca, b, 1, 1, descb, 0.5d0, theirs, 1, 1, descc)

    call check(pmm3d_context(MPI_COMM_WORLD, rows, columns, 'R', context))
    call check(pmm3d_pgemm(context, 'd', 'N', 'N', m, n, k, 2d0, a, 1, 1, desca, b, 1, 1, descb, 0.5d0, c, 1, 1, descc))

    difference = maxval([0d0, abs(c - theirs)])
    call MPI_Reduce(difference, largest, 1, MPI_DOUBLE_PRECISION, MPI_MAX, 0, MPI_COMM_WORLD, ierr)
    if (rank == 0) print "(i0, ' x ', i0, ' ranks: differs from pdgemm by at most ', es8.1)", rows, columns, largest
    call check(pmm3d_finalize())
    call blacs_exit(0)

contains

    ! This rank's part of a matrix of random numbers, and its descriptor.
    subroutine make(height, width, local, desc)
        integer, intent(in) :: height, width
        double precision, allocatable, intent(out) :: local(:, :)
        integer, intent(out) :: desc(9)
        integer :: local_rows, local_columns, info
        local_rows = numroc(height, block, row, 0, rows)
        local_columns = numroc(width, block, column, 0, columns)
        allocate (local(max(1, local_rows), local_columns))
        call random_number(local)
        call descinit(desc, height, width, block, block, 0, 0, blacs, max(1, local_rows), info)
    end subroutine

    subroutine check(code)
        integer, intent(in) :: code
        integer :: error
        if (code == PMM3D_OK) return
        print *, "code", code, ": ", pmm3d_last_error()
        call MPI_Abort(MPI_COMM_WORLD, 1, error)
    end subroutine
end program
